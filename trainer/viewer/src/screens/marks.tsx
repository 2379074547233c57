// Marks: how one is set, what it says, all of a run's in a list, and the files that others work on with.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { get, type MarkRow, type RolloutPage } from "../api";
import { author, find, setAuthor, useMarks, type Place } from "../marks";
import { count, href, Toggle, useKeys } from "../ui";
import { TaskLine } from "./account";

/** The button that marks what a screen shows, the key for it, and what was noted there. */
export function MarkButton({ run, place }: { run: string; place: Place }): JSX.Element {
  const { list, error, save, remove } = useMarks(run);
  const mark = find(list, place);
  const flip = (): void => (mark ? remove(place) : save(place, ""));
  useKeys({ m: flip });
  return (
    <>
      <Toggle on={mark !== undefined} onClick={flip} title="m: mark this for everybody who looks at the run">
        {mark ? "★ marked" : "☆ mark"}
      </Toggle>
      {mark && <Comment mark={mark} onSave={(text) => save(place, text)} />}
      {error && <span class="bad">{error}</span>}
    </>
  );
}

const Comment = ({ mark, onSave }: { mark: MarkRow; onSave: (text: string) => void }): JSX.Element => (
  <span class="comment">
    <input aria-label="comment" placeholder="comment" value={mark.comment} maxLength={4000} onChange={(e) => onSave(e.currentTarget.value)} />
    {mark.author && <small class="dim">by {mark.author}</small>}
  </span>
);

function saveFile(name: string, lines: unknown[]): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(lines.map((line) => `${JSON.stringify(line)}\n`), { type: "application/jsonl" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

async function tasks(run: string, marks: MarkRow[]): Promise<unknown[]> {
  const found: unknown[] = [];
  for (const rollout of new Set(marks.map((mark) => mark.rollout_id).filter(Boolean))) {
    const page = await get<RolloutPage>("rollout", { run, rollout }).catch(() => null);
    if (page?.task_json) found.push(JSON.parse(page.task_json));
  }
  return found;
}

const address = (run: string, mark: MarkRow): string =>
  mark.trace_id
    ? mark.span_id
      ? href("run", run, "tracecall", mark.trace_id, mark.span_id)
      : href("run", run, "trace", mark.trace_id)
    : mark.span_id
      ? href("run", run, "call", mark.rollout_id, mark.attempt_id, mark.span_id)
      : href("run", run, "rollout", mark.rollout_id);

export function Marks({ run }: { run: string }): JSX.Element {
  const { list, loading, error, save, remove } = useMarks(run);
  const [name, setName] = useState(author());
  return (
    <>
      <h1>Marked</h1>
      {error && <p class="note bad">{error}</p>}
      <p class="bar">
        <label>
          your name <input value={name} maxLength={100} placeholder="shown next to your marks" onInput={(e) => (setName(e.currentTarget.value), setAuthor(e.currentTarget.value))} />
        </label>
        <button type="button" disabled={list.length === 0} onClick={() => saveFile("marks.jsonl", list)}>
          Save the marks as JSON lines
        </button>
        <button type="button" disabled={list.length === 0} onClick={() => void tasks(run, list).then((lines) => saveFile("tasks.jsonl", lines))}>
          Save their tasks as a data file
        </button>
      </p>
      <p class="dim" aria-busy={loading ? "true" : undefined}>
        {loading ? (
          "Reading the store …"
        ) : list.length === 0 ? (
          <>
            Nothing is marked in this run. Press <kbd>m</kbd> at a rollout or a call.
          </>
        ) : (
          <>
            {count(list.length, "mark")}, kept in the run’s store and visible to everybody who may look at it.
          </>
        )}
      </p>
      <ul class="links wide">
        {list.map((mark) => (
          <li key={`${mark.rollout_id}/${mark.trace_id}/${mark.span_id}`}>
            <a href={address(run, mark)}>{mark.span_id ? "call" : mark.trace_id ? "trace" : "rollout"}</a>
            <span class="said-to">
              <TaskLine task={mark.task || mark.rollout_id || mark.trace_id} reward={mark.reward} />
            </span>
            <Comment mark={mark} onSave={(text) => save(mark, text)} />
            <button type="button" onClick={() => remove(mark)}>
              remove
            </button>
          </li>
        ))}
      </ul>
    </>
  );
}
