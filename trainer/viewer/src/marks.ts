// What somebody marked, with a comment: kept in this browser, written nowhere else until it is saved as a file.
import { useEffect, useState } from "preact/hooks";

export interface Mark {
  run: string;
  rollout: string;
  attempt: string | null;
  span: string | null;
  comment: string;
  task: string;
  at: number;
}

const NAME = "lightning-rl-marks";

export function marks(): Mark[] {
  try {
    const found: unknown = JSON.parse(localStorage.getItem(NAME) ?? "[]");
    return Array.isArray(found) ? (found as Mark[]) : [];
  } catch {
    return [];
  }
}

const same = (one: Mark, run: string, rollout: string, span: string | null): boolean => one.run === run && one.rollout === rollout && one.span === span;

export function keep(list: Mark[]): void {
  localStorage.setItem(NAME, JSON.stringify(list));
  dispatchEvent(new Event("marks"));
}

export function useMarks(): Mark[] {
  const [list, setList] = useState(marks);
  useEffect(() => {
    const read = (): void => setList(marks());
    addEventListener("marks", read);
    addEventListener("storage", read);
    return () => {
      removeEventListener("marks", read);
      removeEventListener("storage", read);
    };
  }, []);
  return list;
}

export const find = (list: Mark[], run: string, rollout: string, span: string | null): Mark | undefined => list.find((each) => same(each, run, rollout, span));

export function flip(mark: Mark): void {
  const list = marks();
  const rest = list.filter((each) => !same(each, mark.run, mark.rollout, mark.span));
  keep(rest.length < list.length ? rest : [...list, mark]);
}

export function comment(mark: Mark, text: string): void {
  keep(marks().map((each) => (same(each, mark.run, mark.rollout, mark.span) ? { ...each, comment: text } : each)));
}
