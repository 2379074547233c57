// What people marked, with a comment: kept in the run's store, so that everybody who may look sees it.
import { useEffect, useState } from "preact/hooks";
import { get, post, type MarkRow, type MarksPage } from "./api";

const NAME = "lightning-rl-name";

/** What this person is called in marks; kept in this browser. */
export const author = (): string => localStorage.getItem(NAME) ?? "";
export const setAuthor = (name: string): void => localStorage.setItem(NAME, name.trim());

/** The rollout or trace that is marked, and the call in it. */
export interface Place {
  rollout_id: string;
  trace_id: string;
  attempt_id: string;
  span_id: string;
}

export const placeOf = (page: { rollout_id?: string | null; attempt_id?: string | null }, trace: string | undefined, span = ""): Place => ({
  rollout_id: trace ? "" : (page.rollout_id ?? ""),
  trace_id: trace ?? "",
  attempt_id: page.attempt_id ?? "",
  span_id: span,
});

export interface Marks {
  list: MarkRow[];
  loading: boolean;
  error: string;
  save: (place: Place, comment: string) => void;
  remove: (place: Place) => void;
}

const CHANGED = "marks";

/** The marks of a run. They are read again when somebody saved one. */
export function useMarks(run: string): Marks {
  const [known, setList] = useState<MarkRow[] | null>(null);
  const [error, setError] = useState("");
  const fail = (problem: Error): void => setError(problem.message);
  useEffect(() => {
    const stop = new AbortController();
    const read = (): void => {
      get<MarksPage>("marks", { run }, stop.signal)
        .then((page) => setList(page.marks))
        .catch((problem: Error) => !stop.signal.aborted && fail(problem));
    };
    read();
    addEventListener(CHANGED, read);
    return () => {
      stop.abort();
      removeEventListener(CHANGED, read);
    };
  }, [run]);
  const change = (place: Place, more: { comment?: string; marked: boolean }): void => {
    const { rollout_id, trace_id, attempt_id, span_id } = place;
    post<MarksPage>("marks", { run, rollout_id, trace_id, attempt_id, span_id, author: author(), ...more })
      .then((page) => {
        setList(page.marks);
        setError("");
        marksChanged();
      })
      .catch(fail);
  };
  return { list: known ?? [], loading: known === null && error === "", error, save: (place, comment) => change(place, { comment, marked: true }), remove: (place) => change(place, { marked: false }) };
}

export const marksChanged = (): boolean => dispatchEvent(new Event(CHANGED));

export const find = (list: MarkRow[], place: Place): MarkRow | undefined =>
  list.find((each) => each.rollout_id === place.rollout_id && each.trace_id === place.trace_id && each.span_id === place.span_id);
