// Credit: who earned the reward, agent by turn, and the calls that stand out; also under another assigner.
import type { JSX } from "preact";
import { useGet, type CreditPage, type RunPage } from "../api";
import { useParam } from "../params";
import { Agent, go, number, ScaleKey, shade, Show, stepHref, useKeys } from "../ui";
import { Links } from "./account";
import { isUnderWay, lastEnded, StepPicker, stepName } from "./picker";

export function Credit({ run, step, tick }: { run: string; step: number | null; tick: number }): JSX.Element {
  const known = useGet<RunPage>("run", { run }, tick);
  return (
    <Show of={known}>
      {(data) => {
        const chosen = step ?? lastEnded(data.steps);
        if (chosen === undefined) return <p class="note">No training step has ended in this run.</p>;
        const row = data.steps.find((each) => each.mode === "train" && each.step === chosen);
        return <One key={chosen} run={run} step={chosen} known={data.steps} tick={isUnderWay(row) ? tick : 0} />;
      }}
    </Show>
  );
}

function One({ run, step, known, tick }: { run: string; step: number; known: RunPage["steps"]; tick: number }): JSX.Element {
  const [credit, setCredit] = useParam("by");
  const page = useGet<CreditPage>("credit", { run, step, credit }, tick);
  useKeys({ u: () => go(stepHref(run, "step", "train", step)) });
  return (
    <>
      <div class="head">
        <h1>Credit of {stepName("train", step)}</h1>
        <StepPicker run={run} screen="credit" mode="train" step={step} known={known} />
      </div>
      <Show of={page}>
        {(data) => (
          <>
            <p class="bar">
              <label>
                assigned by{" "}
                <select value={data.credit} onChange={(e) => setCredit(e.currentTarget.value)}>
                  {data.credits.map((name) => (
                    <option key={name}>{name}</option>
                  ))}
                </select>
              </label>
              {credit !== "" && <span class="dim">credit as this method would assign it; the rewards are unchanged</span>}
              <span class="grow" />
              <ScaleKey />
            </p>
            <Heat page={data} />
            <div class="two">
              <section class="card">
                <h2>Best calls</h2>
                <Links run={run} links={data.best} />
                {data.best.length === 0 && <p class="dim">none did better than what it was compared with</p>}
              </section>
              <section class="card">
                <h2>Worst calls</h2>
                <Links run={run} links={data.worst} />
                {data.worst.length === 0 && <p class="dim">none did worse</p>}
              </section>
            </div>
            <ul class="card plain">
              {data.lines.map((line) => (
                <li key={line}>{line}</li>
              ))}
            </ul>
          </>
        )}
      </Show>
    </>
  );
}

function Heat({ page }: { page: CreditPage }): JSX.Element {
  const agents = [...new Set(page.cells.map((cell) => cell.agent))];
  const turns = [...new Set(page.cells.map((cell) => cell.turn))].sort((a, b) => a - b);
  return (
    <div class="scroll card" role="group" aria-label="credit by agent and call" tabIndex={0}>
      <table class="heat">
        <thead>
          <tr>
            <th scope="col">agent</th>
            {turns.map((turn) => (
              <th key={turn} scope="col">
                call {turn}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {agents.map((agent) => (
            <tr key={agent}>
              <th scope="row">
                <Agent name={agent} />
                {page.cells.some((cell) => cell.agent === agent && !cell.trained) && <small class="dim"> not trained</small>}
              </th>
              {turns.map((turn) => {
                const cell = page.cells.find((each) => each.agent === agent && each.turn === turn);
                return cell ? (
                  <td key={turn} class={shade(cell.credit)} title={`mean credit of ${cell.calls} calls; ${(cell.better * 100).toFixed(0)} % better, ${(cell.worse * 100).toFixed(0)} % worse than what they were compared with`}>
                    <b>{number(cell.credit, 2)}</b>
                    <small>
                      {number(cell.calls)} calls, contrast {number(cell.contrast, 2)}
                    </small>
                  </td>
                ) : (
                  <td key={turn} />
                );
              })}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
