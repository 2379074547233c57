// Credit: who earned the reward, agent by turn, and the calls that stand out; also under another assigner.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useGet, type CreditPage, type RunPage } from "../api";
import { Agent, go, href, number, shade, Show, useKeys } from "../ui";
import { Links } from "./account";
import { goesOn, StepPicker } from "./step";

export function Credit({ run, step, tick }: { run: string; step: number | null; tick: number }): JSX.Element {
  const known = useGet<RunPage>("run", { run }, tick);
  return (
    <Show of={known}>
      {(data) => {
        const chosen = step ?? data.steps.filter((row) => row.mode === "train" && !goesOn(row)).at(-1)?.step;
        return chosen === undefined ? <p class="note">No step of training has ended here.</p> : <One key={chosen} run={run} step={chosen} known={data.steps} tick={goesOn(data.steps.find((row) => row.mode === "train" && row.step === chosen)) ? tick : 0} />;
      }}
    </Show>
  );
}

function One({ run, step, known, tick }: { run: string; step: number; known: RunPage["steps"]; tick: number }): JSX.Element {
  const [credit, setCredit] = useState<string | null>(null);
  const page = useGet<CreditPage>("credit", { run, step, credit }, tick);
  useKeys({ u: () => go(href("run", run, "step", "train", step)) });
  return (
    <>
      <div class="head">
        <h1>Credit of step {step}</h1>
        <StepPicker run={run} screen="credit" mode="train" step={step} known={known} />
      </div>
      <Show of={page}>
        {(data) => (
          <>
            <p class="bar">
              <label>
                shared out by{" "}
                <select value={data.credit} onChange={(e) => setCredit(e.currentTarget.value)}>
                  {data.credits.map((name) => (
                    <option key={name}>{name}</option>
                  ))}
                </select>
              </label>
              {credit !== null && <span class="dim">as this assigner would have done; the run’s rewards stay as they are</span>}
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
  const values = page.cells.map((cell) => cell.credit).filter((each): each is number => each !== null);
  const [low, high] = [Math.min(0, ...values), Math.max(0, ...values)];
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
                  <td key={turn} class={shade(cell.credit, low, high)} title={`mean credit of ${cell.calls} calls; ${(cell.better * 100).toFixed(0)} % better, ${(cell.worse * 100).toFixed(0)} % worse than what they were compared with`}>
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
