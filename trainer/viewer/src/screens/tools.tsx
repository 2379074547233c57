// Tools: which fail, which are slow, which are asked the same twice. Fleet: who works, what waits, what has stalled.
import type { JSX } from "preact";
import { useGet, type FleetPage, type RunPage, type ToolsPage } from "../api";
import { Agent, Chip, duration, go, href, number, Show, useKeys } from "../ui";
import { goesOn, lastStep, nameOf, StepPicker } from "./step";

export function Tools({ run, mode, step, tick }: { run: string; mode: string; step: number | null; tick: number }): JSX.Element {
  const known = useGet<RunPage>("run", { run }, tick);
  return (
    <Show of={known}>
      {(data) => {
        const row = step === null ? lastStep(data.steps, mode) : data.steps.find((each) => each.mode === mode && each.step === step);
        return row === undefined ? <p class="note">No such rollout is in this store.</p> : <One key={`${row.mode}${row.step}`} run={run} mode={row.mode} step={row.step} known={data.steps} tick={goesOn(row) ? tick : 0} />;
      }}
    </Show>
  );
}

function One({ run, mode, step, known, tick }: { run: string; mode: string; step: number; known: RunPage["steps"]; tick: number }): JSX.Element {
  const page = useGet<ToolsPage>("tools", { run, mode, step }, tick);
  useKeys({ u: () => go(href("run", run, "step", mode, step)) });
  return (
    <>
      <div class="head">
        <h1>Tools of {nameOf(mode, step)}</h1>
        <StepPicker run={run} screen="tools" mode={mode} step={step} known={known} />
      </div>
      <Show of={page}>
        {(data) =>
          data.tools.length === 0 ? (
            <p class="note">No tool was used in {data.rollouts} attempts.</p>
          ) : (
            <div class="scroll">
              <table class="rows">
                <thead>
                  <tr>
                    <th>tool</th>
                    <th>agent</th>
                    <th class="num">calls</th>
                    <th class="num">errors</th>
                    <th>share of errors</th>
                    <th class="num">same arguments again</th>
                    <th class="num">median</th>
                    <th class="num">slowest</th>
                    <th>an error</th>
                  </tr>
                </thead>
                <tbody>
                  {data.tools.map((row) => (
                    <tr key={`${row.tool}/${row.agent}`}>
                      <td>
                        <b>{row.tool}</b>
                      </td>
                      <td>
                        <Agent name={row.agent} />
                      </td>
                      <td class="num">{number(row.calls)}</td>
                      <td class={`num ${row.errors ? "bad" : ""}`}>{number(row.errors)}</td>
                      <td>
                        <span class="meter">
                          <i style={{ width: `${(row.errors / row.calls) * 100}%` }} />
                        </span>{" "}
                        {((row.errors / row.calls) * 100).toFixed(0)} %
                      </td>
                      <td class="num">{number(row.repeated)}</td>
                      <td class="num">{duration(row.ms_median)}</td>
                      <td class="num">
                        {row.slowest ? <a href={href("run", run, "rollout", row.slowest.rollout_id, row.slowest.attempt_id, row.slowest.span_id)}>{duration(row.ms_slowest)}</a> : duration(row.ms_slowest)}
                      </td>
                      <td class="snippet">{row.failed ? <a href={href("run", run, "rollout", row.failed.rollout_id, row.failed.attempt_id, row.failed.span_id)}>{row.error || "error"}</a> : ""}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          )
        }
      </Show>
    </>
  );
}

export function Fleet({ run, tick }: { run: string; tick: number }): JSX.Element {
  const page = useGet<FleetPage>("fleet", { run }, tick);
  return (
    <>
      <h1>Fleet</h1>
      <Show of={page}>
        {(data) => (
          <>
            <p class="facts">
              <span>
                <b>{number(data.queued)}</b> rollouts wait
              </span>
              <span>
                <b>{number(data.running)}</b> attempts run
              </span>
            </p>
            {data.oldest.length > 0 && (
              <>
                <h2>Under way, the longest first</h2>
                <div class="scroll">
                  <table class="rows">
                    <tbody>
                      {data.oldest.map((row) => (
                        <tr key={row.attempt_id}>
                          <td>
                            <a href={href("run", run, "rollout", row.rollout_id, row.attempt_id)}>{row.rollout_id}</a>
                          </td>
                          <td>{row.worker}</td>
                          <td class="num">{duration(row.seconds * 1000)}</td>
                          <td>{row.limit_s !== null && row.seconds > row.limit_s ? <Chip kind="bad">beyond its limit of {duration(row.limit_s * 1000)}</Chip> : row.limit_s !== null ? `of ${duration(row.limit_s * 1000)}` : "no limit"}</td>
                        </tr>
                      ))}
                    </tbody>
                  </table>
                </div>
              </>
            )}
            <h2>Runners</h2>
            <div class="scroll" role="group" aria-label="runners" tabIndex={0}>
              <table class="rows">
                <thead>
                  <tr>
                    <th>worker</th>
                    <th class="num">attempts</th>
                    <th class="num">running</th>
                    <th>ended</th>
                    <th>last seen</th>
                  </tr>
                </thead>
                <tbody>
                  {data.workers.map((row) => (
                    <tr key={row.worker}>
                      <td>{row.worker}</td>
                      <td class="num">{number(row.attempts)}</td>
                      <td class="num">{number(row.running)}</td>
                      <td>
                        {Object.entries(row.status)
                          .filter(([status]) => status !== "running")
                          .map(([status, n]) => (
                            <Chip key={status} kind={status === "succeeded" ? "" : "bad"}>
                              {n} {status}
                            </Chip>
                          ))}
                      </td>
                      <td>{row.last_s === null ? "–" : new Date(row.last_s * 1000).toLocaleString()}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          </>
        )}
      </Show>
    </>
  );
}
