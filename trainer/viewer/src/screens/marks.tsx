// What was marked, with comments, and the files that others work on with: marks, and tasks to run again.
import type { JSX } from "preact";
import { get, type RolloutPage } from "../api";
import { comment, keep, marks as all, useMarks, type Mark } from "../marks";
import { count, href } from "../ui";

function save(name: string, lines: unknown[]): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(lines.map((line) => `${JSON.stringify(line)}\n`), { type: "application/jsonl" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

async function tasks(run: string, marked: Mark[]): Promise<unknown[]> {
  const found: unknown[] = [];
  for (const id of new Set(marked.map((mark) => mark.rollout))) {
    const page = await get<RolloutPage>("rollout", { run, rollout: id }).catch(() => null);
    if (page?.task_json) found.push(JSON.parse(page.task_json));
  }
  return found;
}

export function Marks({ run }: { run: string }): JSX.Element {
  const marked = useMarks().filter((mark) => mark.run === run);
  const ids = [...new Set(marked.map((mark) => mark.rollout))];
  return (
    <>
      <h1>Marked</h1>
      {marked.length === 0 && (
        <p class="note">
          Nothing is marked in this run. Press <kbd>m</kbd> at a rollout or a call.
        </p>
      )}
      {marked.length > 0 && (
        <>
          <p class="bar">
            <button type="button" onClick={() => save("marks.jsonl", marked.map(({ rollout, attempt, span, comment }) => ({ rollout_id: rollout, attempt_id: attempt, span_id: span, comment })))}>
              Save the marks as JSON lines
            </button>
            <button type="button" onClick={() => void tasks(run, marked).then((lines) => save("tasks.jsonl", lines))}>
              Save their tasks, to train or evaluate on
            </button>
            <button type="button" onClick={() => keep(all().filter((mark) => mark.run !== run))}>
              Unmark all
            </button>
          </p>
          <p class="dim">
            Marks are kept in this browser alone. In a terminal: <code>lightning-rl traces {ids.slice(0, 3).map((id) => `--rollout ${id} `)}…</code>
          </p>
          <p>{count(marked.length, "mark")}</p>
          <ul class="links wide">
            {marked.map((mark) => (
              <li key={`${mark.rollout}${mark.span}`}>
                <a href={mark.span ? href("run", run, "call", mark.rollout, mark.attempt ?? "", mark.span) : href("run", run, "rollout", mark.rollout)}>{mark.span ? "call" : "rollout"}</a>
                <span class="snippet">{mark.task || mark.rollout}</span>
                <input aria-label="comment" placeholder="comment" value={mark.comment} onChange={(e) => comment(mark, e.currentTarget.value)} />
              </li>
            ))}
          </ul>
        </>
      )}
    </>
  );
}
