// Search in everything that was recorded, a second at a time.
import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { get, type SearchPage } from "../api";
import { Agent, count, go, href } from "../ui";
import { TaskLine } from "./account";

type Hit = SearchPage["hits"][number];

interface Place {
  after: number;
  calls: boolean;
}

/** Show identical places of one task once, with their number. */
function folded(hits: Hit[]): { hit: Hit; times: number }[] {
  const found = new Map<string, { hit: Hit; times: number }>();
  for (const hit of hits) {
    const key = JSON.stringify([hit.name, hit.agent, hit.before, hit.match, hit.behind, hit.task, hit.rollout_id === null ? hit.trace_id : ""]);
    const known = found.get(key);
    if (known) known.times += 1;
    else found.set(key, { hit, times: 1 });
  }
  return [...found.values()];
}

const START: Place = { after: 0, calls: false };

export function Search({ run, text }: { run: string; text: string }): JSX.Element {
  const [hits, setHits] = useState<SearchPage["hits"]>([]);
  const [next, setNext] = useState<Place | null>(START);
  const [looked, setLooked] = useState(0);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState("");
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => field.current?.focus(), []);
  const look = async (from: Place, before: SearchPage["hits"], signal?: AbortSignal): Promise<void> => {
    setBusy(true);
    try {
      let at: Place | null = from;
      let seen = from === START ? 0 : looked;
      const found = [...before];
      while (at !== null && found.length < before.length + 50 && !signal?.aborted) {
        const page: SearchPage = await get<SearchPage>("search", { run, text, after: at.after, calls: at.calls }, signal);
        found.push(...page.hits);
        at = page.next === null || page.next === undefined ? null : { after: page.next, calls: page.calls };
        seen += page.looked;
        setHits([...found]);
        setLooked(seen);
        setNext(at);
      }
    } catch (problem) {
      if (!signal?.aborted) setError((problem as Error).message);
    }
    setBusy(false);
  };
  useEffect(() => {
    const stop = new AbortController();
    if (text) void look(START, [], stop.signal);
    return () => stop.abort();
  }, [text]);
  return (
    <>
      <h1>Search</h1>
      <form
        class="bar"
        role="search"
        onSubmit={(e) => {
          e.preventDefault();
          const value = String(new FormData(e.currentTarget).get("text") ?? "").trim();
          if (value) go(href("run", run, "search", value));
        }}
      >
        <label class="grow">
          text <input type="search" name="text" defaultValue={text} ref={field} placeholder="in prompts, answers, arguments, results, errors, names" />
        </label>
        <button type="submit">Search</button>
      </form>
      {error && <p class="note bad">{error}</p>}
      {text && (
        <p class="dim" aria-live="polite">
          {count(hits.length, "place")} found in {count(looked, "record")}
          {busy ? " …" : ""}
        </p>
      )}
      <ul class="links wide">
        {folded(hits).map(({ hit, times }, at) => (
          <li key={at}>
            <a
              href={
                hit.rollout_id
                  ? href("run", run, "rollout", hit.rollout_id, hit.attempt_id ?? "", hit.span_id ?? "")
                  : href("run", run, "trace", hit.trace_id ?? "", hit.span_id ?? "")
              }
            >
              {hit.name}
            </a>
            <Agent name={hit.agent} />
            <span class="said-to">
              <span class="snippet">
                {hit.before}
                <mark>{hit.match}</mark>
                {hit.behind}
              </span>
              {hit.rollout_id && <TaskLine task={hit.task} reward={hit.reward} times={times} />}
            </span>
          </li>
        ))}
      </ul>
      {text && next !== null && !busy && (
        <button type="button" onClick={() => void look(next, hits)}>
          Search further
        </button>
      )}
    </>
  );
}
