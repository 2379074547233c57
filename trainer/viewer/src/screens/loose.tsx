// Traces outside of rollouts: what an attached program records by itself, and what production sends.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useGet, type LoosePage } from "../api";
import { Agent, Chip, href, number, Show } from "../ui";

export function Loose({ run }: { run: string }): JSX.Element {
  const [pages, setPages] = useState<(number | null)[]>([null]);
  return (
    <>
      <h1>Traces outside of rollouts</h1>
      <div class="scroll">
        <table class="rows">
          <thead>
            <tr>
              <th>began</th>
              <th>trace</th>
              <th>origin</th>
              <th>agents</th>
              <th class="num">calls</th>
              <th class="num">spans</th>
              <th class="num">errors</th>
            </tr>
          </thead>
          {pages.map((before, at) => (
            <Part key={at} run={run} before={before} last={at === pages.length - 1} onMore={(next) => setPages([...pages, next])} />
          ))}
        </table>
      </div>
    </>
  );
}

function Part({ run, before, last, onMore }: { run: string; before: number | null; last: boolean; onMore: (next: number) => void }): JSX.Element {
  const page = useGet<LoosePage>("loose", { run, before });
  return (
    <tbody>
      <Show of={page}>
        {(data) => (
          <>
            {data.traces.map((row) => (
              <tr key={row.trace_id}>
                <td>{new Date(row.start_s * 1000).toLocaleString()}</td>
                <td>
                  <a href={href("run", run, "trace", row.trace_id)}>{row.name || row.trace_id}</a>
                </td>
                <td>
                  <Chip>{row.origin}</Chip>
                </td>
                <td>
                  {row.agents.map((name) => (
                    <Agent key={name} name={name} />
                  ))}
                </td>
                <td class="num">{number(row.calls)}</td>
                <td class="num">{number(row.spans)}</td>
                <td class={`num ${row.errors ? "bad" : ""}`}>{number(row.errors)}</td>
              </tr>
            ))}
            {last && data.next !== null && (
              <tr>
                <td colSpan={7}>
                  <button type="button" onClick={() => onMore(data.next ?? 0)}>
                    Earlier ones
                  </button>
                </td>
              </tr>
            )}
          </>
        )}
      </Show>
    </tbody>
  );
}
