// Two agents. Nothing but Go's own library: go run agent.go
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strings"
)

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// --8<-- [start:ask]
func ask(agent, system, text string) string {
	model := os.Getenv("LIGHTNING_MODEL")
	if model == "" {
		model = "gpt-4.1-mini"
	}
	body, _ := json.Marshal(map[string]any{
		"model":      model,
		"messages":   []message{{"system", system}, {"user", text}},
		"max_tokens": 32,
	})
	request, err := http.NewRequest("POST", os.Getenv("OPENAI_BASE_URL")+"/chat/completions", bytes.NewReader(body))
	if err != nil {
		log.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+os.Getenv("OPENAI_API_KEY"))
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("x-lightning-agent", agent) // who asks
	reply, err := http.DefaultClient.Do(request)
	if err != nil {
		log.Fatal(err)
	}
	defer reply.Body.Close()
	read, _ := io.ReadAll(reply.Body)
	var answer struct {
		Choices []struct{ Message message }
	}
	if err := json.Unmarshal(read, &answer); err != nil || len(answer.Choices) == 0 {
		log.Fatalf("%s: %s", reply.Status, read) // log.Fatal ends with status 1: the attempt has failed
	}
	return strings.TrimSpace(answer.Choices[0].Message.Content)
}

// --8<-- [end:ask]

// --8<-- [start:main]
func main() {
	var task struct{ Message, Kind string }
	if err := json.NewDecoder(os.Stdin).Decode(&task); err != nil { // the task, on stdin
		log.Fatal(err)
	}
	kind := ask("sorter", "Answer with one word: refund, delivery or account.", task.Message)
	answer := ask("writer", "Answer in one sentence. It is about: "+kind, task.Message)
	fmt.Println("answer:", answer) // print what you like
	last, _ := json.Marshal(map[string]any{"reward": map[string]float64{
		"sorter": number(kind == task.Kind),
		"writer": number(strings.HasSuffix(answer, ".")),
	}})
	fmt.Println(string(last)) // the last line: rewards by agent
}

// --8<-- [end:main]

func number(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}
