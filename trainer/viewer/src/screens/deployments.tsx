// Which policy answers each agent, how its candidate does, and where the loops are.
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { get, useGet, type DeploymentRow, type DeploymentsPage, type FindingsPage, type LoopRow } from "../api";
import { SortedTable, type Column } from "../table";
import { Agent, Chip, href, number, Show } from "../ui";
import { interval, rise, toneOf } from "./headline";

export const when = (at_s: number): string => new Date(at_s * 1000).toLocaleString();

export const percent = (share: number): string => `${number(share * 100, 1)} %`;

export const StageChip = ({ row }: { row: DeploymentRow }): JSX.Element => {
  const { stage } = row.newest;
  return <Chip kind={stage === "rolled_back" ? "bad" : stage === "shadow" || stage === "canary" ? "busy" : stage === "candidate" ? "quiet" : ""}>{stage.replace("_", " ")}</Chip>;
};

/** What is known about the candidates, one agent after the other: to weigh a canary takes a while. */
function useFindings(run: string, rows: DeploymentRow[], tick: number): { findings: Map<string, FindingsPage>; error: Error | null } {
  const [findings, setFindings] = useState<Map<string, FindingsPage>>(new Map());
  const [error, setError] = useState<Error | null>(null);
  const tried = rows.filter((row) => row.tried).map((row) => row.agent);
  useEffect(() => {
    const stop = new AbortController();
    const read = async (): Promise<void> => {
      for (const agent of tried) {
        const page = await get<FindingsPage>("findings", { run, agent }, stop.signal);
        setFindings((before) => new Map(before).set(agent, page));
      }
      setError(null);
    };
    read().catch((problem: Error) => !stop.signal.aborted && setError(problem));
    return () => stop.abort();
  }, [run, tried.join("|"), tick]);
  return { findings, error };
}

export function Deployments({ run, tick }: { run: string; tick: number }): JSX.Element {
  const page = useGet<DeploymentsPage>("deployments", { run }, tick);
  return (
    <>
      <div class="head">
        <h1>Deployments</h1>
      </div>
      <Show of={page}>{(data) => <Agents run={run} page={data} tick={tick} />}</Show>
    </>
  );
}

function Agents({ run, page, tick }: { run: string; page: DeploymentsPage; tick: number }): JSX.Element {
  const { findings, error } = useFindings(run, page.agents, tick);
  return (
    <>
      {error && (
        <p class="note bad" role="alert">
          {error.message}
        </p>
      )}
      {page.agents.length === 0 ? (
        <p class="note">
          No agent of this store has a deployment. The first one is named by <code>lightning-rl deploy candidate --agent NAME --stable MODEL</code>.
        </p>
      ) : (
        <SortedTable label="deployments" columns={columns(run, findings)} rows={page.agents} first="agent" />
      )}
      {page.loops.length > 0 && <h2>Loops</h2>}
      {page.loops.map((loop) => (
        <Loop key={loop.folder} loop={loop} />
      ))}
    </>
  );
}

const columns = (run: string, findings: Map<string, FindingsPage>): Column<DeploymentRow>[] => {
  const of = (row: DeploymentRow): FindingsPage | undefined => (row.tried ? findings.get(row.agent) : undefined);
  return [
    { name: "agent", text: true, value: (row) => row.agent, cell: (row) => <a href={href("run", run, "deployments", row.agent)}><Agent name={row.agent} /></a> },
    { name: "stage", text: true, value: (row) => row.newest.stage, cell: (row) => <StageChip row={row} /> },
    { name: "stable", label: "stable policy", text: true, value: (row) => row.newest.stable, cell: (row) => <span class="policy">{row.newest.stable}</span> },
    { name: "candidate", text: true, value: (row) => row.newest.candidate, cell: (row) => <span class="policy">{row.newest.candidate ?? ""}</span> },
    { name: "share", title: "of the conversations that the candidate answers, or in a shadow gets copies of", value: (row) => row.newest.share, cell: (row) => (row.newest.share > 0 ? percent(row.newest.share) : "–") },
    { name: "outcomes", title: "of both policies, and about how many the gate needs", value: (row) => of(row)?.gate?.n, cell: (row) => <Outcomes of={of(row)} /> },
    { name: "difference", label: "difference, 95 %", title: "candidate minus stable policy; the interval holds for all looks together", value: (row) => of(row)?.gate?.difference, cell: (row) => <Difference of={of(row)} /> },
    { name: "gate", text: true, value: (row) => of(row)?.gate?.decision, cell: (row) => <Decision of={of(row)} /> },
    { name: "changed", label: "last change", value: (row) => row.newest.at_s, cell: (row) => `${when(row.newest.at_s)}, ${row.newest.actor}` },
  ];
};

const Outcomes = ({ of }: { of: FindingsPage | undefined }): JSX.Element =>
  of?.gate ? (
    <>
      {number(of.gate.n)}
      {of.gate.needed !== null && <small> of about {number(of.gate.needed)}</small>}
    </>
  ) : (
    <>–</>
  );

const Difference = ({ of }: { of: FindingsPage | undefined }): JSX.Element =>
  of?.gate && of.gate.difference !== null ? (
    <>
      <b class={toneOf(of.gate)}>{rise(of.gate.difference)}</b> <small>{interval(of.gate.low, of.gate.high)}</small>
    </>
  ) : (
    <>–</>
  );

function Decision({ of }: { of: FindingsPage | undefined }): JSX.Element {
  if (!of) return <></>;
  if (of.problem) return <Chip kind="bad" title={of.problem}>no outcome can be read</Chip>;
  const alarms = of.guardrails.filter((guard) => guard.alarm);
  return (
    <>
      {of.gate && <Chip kind={of.gate.decision === "reject" ? "bad" : of.gate.decision === "wait" ? "quiet" : ""}>{of.gate.decision}</Chip>}
      {alarms.map((guard) => (
        <Chip key={guard.name} kind="bad">
          alarm: {guard.name}
        </Chip>
      ))}
      {of.program && of.program.changes.length > 0 && <Chip kind="bad" title={of.program.changes.join("; ")}>program changed</Chip>}
      {of.blocked && <Chip kind="bad" title={of.blocked}>blocked</Chip>}
    </>
  );
}

/** A loop: the stages of its newest round, and how the earlier ones ended. */
function Loop({ loop }: { loop: LoopRow }): JSX.Element {
  const current = loop.stages.find((stage) => stage.state === "waiting" || stage.state === "current");
  const state = loop.outcome !== null ? `${loop.outcome}. ${loop.reason}` : current ? `${current.stage}${current.text ? ` waits for ${current.text}` : ""}` : "";
  return (
    <details class="card loop" open>
      <summary>
        <Agent name={loop.agent} />
        {loop.problem === null && (
          <>
            round {loop.round}: <b>{state}</b>
          </>
        )}
      </summary>
      {loop.problem !== null && <p class="note bad">{loop.problem}</p>}
      {loop.stages.length > 0 && (
        <div class="scroll" role="group" aria-label={`stages of the loop of ${loop.agent}`} tabIndex={0}>
          <table class="by-agent">
            <thead>
              <tr>
                <th>stage</th>
                <th>state</th>
                <th>done</th>
                <th>result</th>
              </tr>
            </thead>
            <tbody>
              {loop.stages.map((stage) => (
                <tr key={stage.stage}>
                  <th scope="row">{stage.stage}</th>
                  <td>{stage.state === "-" ? "–" : <Chip kind={stage.state === "done" ? "" : stage === current ? "busy" : "quiet"}>{stage.state}</Chip>}</td>
                  <td>{stage.done_s === null ? "" : when(stage.done_s)}</td>
                  <td class="why">{stage.text}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {loop.earlier.map((line) => (
        <p key={line} class="dim">
          {line}
        </p>
      ))}
      <p class="dim">
        Folder: <code>{loop.folder}</code>
      </p>
    </details>
  );
}
