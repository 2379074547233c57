#!/usr/bin/env bash
# One agent. curl and jq: bash agent.sh
set -euo pipefail

# --8<-- [start:main]
task=$(cat) # the task, on stdin; LIGHTNING_TASK has it, too

ask() { # AGENT SYSTEM TEXT
  jq -n --arg model "${LIGHTNING_MODEL:-gpt-4.1-mini}" --arg system "$2" --arg text "$3" '{
      model: $model, max_tokens: 32,
      messages: [{role: "system", content: $system}, {role: "user", content: $text}]
    }' |
    curl --fail-with-body --silent --show-error "$OPENAI_BASE_URL/chat/completions" \
      -H "authorization: Bearer $OPENAI_API_KEY" -H "content-type: application/json" \
      -H "x-lightning-agent: $1" --data-binary @- |
    jq -r '.choices[0].message.content'
}

kind=$(ask sorter "Answer with one word: refund, delivery or account." "$(jq -r .message <<<"$task")")
echo "the message is about: $kind"
jq -n -c --arg kind "$kind" --argjson task "$task" '{reward: {sorter: (if $kind == $task.kind then 1 else 0 end)}}'
# --8<-- [end:main]
