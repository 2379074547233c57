// Steps: what they are called, which one a screen shows, and the way from one to the next.
import type { JSX } from "preact";
import type { RunPage, StepRow } from "../api";
import { query } from "../params";
import { go, isOpen, stepHref, useKeys } from "../ui";

/** What a screen without a step in its address shows: the last of training, or of whatever was run. */
export const lastStep = (known: StepRow[], mode: string): StepRow | undefined => known.filter((row) => row.mode === (mode || "train")).at(-1) ?? (mode ? undefined : known.at(-1));

/** The last step of training in which nothing is running or queued. */
export const lastEnded = (known: StepRow[]): number | undefined => known.filter((row) => row.mode === "train" && !isUnderWay(row)).at(-1)?.step;

/** Whether rollouts of a step are running or queued, so that its numbers will change. */
export const isUnderWay = (row: StepRow | undefined): boolean => Object.keys(row?.status ?? {}).some(isOpen);

/** What people call a step: steps count from 1. */
export const stepName = (mode: string | null | undefined, step: number | null | undefined): string =>
  mode === "train" ? `step ${(step ?? 0) + 1}` : mode !== "val" ? "rollouts outside of steps" : step === 0 ? "held out, before training" : `held out after step ${step}`;

export const capital = (text: string): string => text.charAt(0).toUpperCase() + text.slice(1);

export function StepPicker({ run, screen, mode, step, known }: { run: string; screen: string; mode: string; step: number; known: RunPage["steps"] }): JSX.Element {
  const onlyTrain = screen === "account" || screen === "credit";
  const at = known.findIndex((row) => row.mode === mode && row.step === step);
  const open = (kind: string, number: number): void => go(stepHref(run, screen, kind, number) + query());
  const next = (by: number): StepRow | undefined => (by > 0 ? known.slice(at + 1) : known.slice(0, at).reverse()).find((row) => row.mode === mode);
  const move = (by: number): void => {
    const row = next(by);
    if (row) open(row.mode, row.step);
  };
  useKeys({ n: () => move(1), p: () => move(-1) });
  return (
    <span class="picker">
      <button type="button" aria-label="previous step" disabled={!next(-1)} onClick={() => move(-1)}>
        ‹
      </button>
      <select
        aria-label="step"
        value={`${mode}/${step}`}
        onChange={(e) => {
          const [kind = "", number = ""] = e.currentTarget.value.split("/");
          open(kind, Number(number));
        }}
      >
        {known
          .filter((row) => row.mode === "train" || !onlyTrain)
          .map((row) => (
            <option key={`${row.mode}/${row.step}`} value={`${row.mode}/${row.step}`}>
              {stepName(row.mode, row.step)}
            </option>
          ))}
      </select>
      <button type="button" aria-label="next step" disabled={!next(1)} onClick={() => move(1)}>
        ›
      </button>
    </span>
  );
}
