// One agent's deployment: who answers, what the candidate's evidence is, what a promotion still needs, and the history.
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { get, useGet, type DeploymentPage, type FindingsPage, type GateRow, type GuardrailRow, type ShadowRow, type TransitionRow } from "../api";
import { Agent, Chip, count, go, href, number, Show, useKeys } from "../ui";
import { Act } from "./act";
import { Commands, quoted } from "./commands";
import { percent, StageChip, when } from "./deployments";
import { Figure, interval, rise, toneOf } from "./headline";

const STAGES = ["candidate", "shadow", "canary", "stable"] as const;

export function Deployment({ run, agent, tick }: { run: string; agent: string; tick: number }): JSX.Element {
  const [acted, setActed] = useState(0); // the server tells of the change, but a person who made one waits for it
  const page = useGet<DeploymentPage>("deployment", { run, agent }, tick + acted);
  const findings = useGet<FindingsPage>("findings", { run, agent }, tick + acted);
  useKeys({ u: () => go(href("run", run, "deployments")) });
  return (
    <>
      <div class="head">
        <p class="crumbs">
          <a href={href("run", run, "deployments")}>Deployments</a>
        </p>
        <h1>
          <Agent name={agent} />
        </h1>
        {page.data && <StageChip row={page.data.row} />}
      </div>
      <Show of={page}>
        {(data) => (
          <>
            <State page={data} gate={findings.data?.gate ?? null} />
            <Show of={findings}>{(found) => <Known page={data} found={found} />}</Show>
            {data.acts && <Act page={data} done={() => setActed((before) => before + 1)} />}
            <Terminal page={data} found={findings.data} />
            <History run={run} page={data} />
          </>
        )}
      </Show>
    </>
  );
}

function sentence({ row }: DeploymentPage): string {
  const { stage, stable, candidate, share } = row.newest;
  switch (stage) {
    case "candidate":
      return `${stable} answers all conversations. The candidate ${candidate} answers none yet.`;
    case "shadow":
      return `${stable} answers all conversations. The candidate ${candidate} answers copies of ${percent(share)} of them, which no user sees.`;
    case "canary":
      return `The candidate ${candidate} answers ${percent(share)} of the conversations, and ${stable} the others.`;
    case "rolled_back":
      return `${stable} answers all conversations. ${candidate} was rolled back.`;
    default:
      return `${stable} answers all conversations.`;
  }
}

function State({ page, gate }: { page: DeploymentPage; gate: GateRow | null }): JSX.Element {
  const { newest, previous, tried, dropped } = page.row;
  return (
    <section class="headline card" aria-label="state">
      <ol class="stages" aria-label="stages">
        {STAGES.map((stage) => (
          <li key={stage} aria-current={stage === newest.stage ? "step" : undefined}>
            {stage === newest.stage ? <b>{stage}</b> : stage}
          </li>
        ))}
      </ol>
      <p class="lead breaks">{sentence(page)}</p>
      <dl class="figures">
        {gate && (
          <>
            <Figure label="Difference of the outcomes" value={rise(gate.difference)} tone={toneOf(gate)}>
              {gate.difference === null ? "at least 100 outcomes of each policy are needed" : `${interval(gate.low, gate.high)} (95 %, all looks together)`}
            </Figure>
            <Figure label="Outcomes" value={number(gate.n)}>
              {gate.needed === null ? "" : `of about ${number(gate.needed)} that are needed; `}
              {number(gate.candidate)} of the candidate, {number(gate.stable)} of the stable policy
            </Figure>
            <Figure label="Gate" value={gate.decision} tone={gate.decision === "reject" ? "bad" : gate.decision === "promote" ? "good" : ""}>
              {gate.sources.length ? `judged by ${gate.sources.join(", ")}` : "judged by all rewards"}
              {gate.wait_days > 0 && `, ${number(gate.wait_days)} days old or more`}
            </Figure>
          </>
        )}
        <Figure label="Last change" value={newest.note === "approval" ? newest.note : newest.stage.replace("_", " ")}>
          {when(newest.at_s)}, {newest.actor}
          {newest.reason && `: ${newest.reason}`}
        </Figure>
        {!tried && !dropped && previous !== null && (
          <Figure label="A rollback returns to" value="">
            <span class="policy">{previous}</span>
          </Figure>
        )}
      </dl>
    </section>
  );
}

function Known({ page, found }: { page: DeploymentPage; found: FindingsPage }): JSX.Element {
  const { gate, guardrails, shadow, program, approval } = found;
  return (
    <>
      {found.problem !== null && (
        <p class="note bad" role="alert">
          {found.problem}
        </p>
      )}
      {found.blocked !== null && (
        <p class="note bad" role="alert">
          The checkpoint <code>{page.checkpoint}</code> is blocked: {found.blocked}.
        </p>
      )}
      {program !== null && program.changes.length > 0 && (
        <div class="note bad" role="alert">
          The program has changed since the evaluation, so the gate is closed.
          <ul class="missing">
            {program.changes.map((change) => (
              <li key={change}>{change}</li>
            ))}
          </ul>
        </div>
      )}
      {page.row.tried && <Missing found={found} />}
      <div class="evidence">
        {gate && <Gate gate={gate} />}
        {guardrails.length > 0 && <Guardrails rows={guardrails} />}
        {shadow && <Shadow shadow={shadow} />}
        {page.row.tried && (
          <section class="card" aria-label="checks">
            <h2>Checks</h2>
            <table class="pairs">
              <tbody>
                <tr>
                  <th scope="row">approval</th>
                  <td>{approval ? `by ${approval.actor}, ${when(approval.at_s)}${approval.reason ? `: ${approval.reason}` : ""}${found.verified ? "" : " (the server verifies it at the promotion)"}` : page.row.needs_approval ? "needed, not given" : "not needed"}</td>
                </tr>
                <tr>
                  <th scope="row">program</th>
                  <td>{program === null ? "no evaluation was given" : program.changes.length ? "changed" : `as evaluated, in ${count(program.conversations, "conversation")}${program.conversations < program.needed ? `; compared from ${program.needed} on` : ""}`}</td>
                </tr>
                <tr>
                  <th scope="row">checkpoint</th>
                  <td>{page.checkpoint === null ? "a model of the server" : <code>{page.checkpoint}</code>}{found.blocked !== null && ", blocked"}</td>
                </tr>
              </tbody>
            </table>
          </section>
        )}
      </div>
      <p class="dim">Outcomes and calls read at {when(found.read_s)}.</p>
    </>
  );
}

function Missing({ found }: { found: FindingsPage }): JSX.Element {
  if (found.problem !== null) return <></>;
  if (found.missing.length === 0) return <p class="note">Nothing is missing for a promotion.</p>;
  return (
    <section class="card" aria-label="what a promotion still needs">
      <h2>A promotion still needs</h2>
      <ul class="missing">
        {found.missing.map((line) => (
          <li key={line}>{line}</li>
        ))}
      </ul>
    </section>
  );
}

function Gate({ gate }: { gate: GateRow }): JSX.Element {
  return (
    <section class="card" aria-label="gate">
      <h2>Gate</h2>
      {gate.difference !== null && gate.low !== null && gate.high !== null && <Range value={gate.difference} low={gate.low} high={gate.high} marks={[[-gate.worse, "worse", "end"], [0, "", "middle"], [gate.better, "better", "start"]]} />}
      <table class="pairs">
        <tbody>
          <tr>
            <th scope="row">worse by {number(gate.worse)}</th>
            <td>promoted in at most {percent(gate.false_promotion)} of cases</td>
          </tr>
          <tr>
            <th scope="row">better by {number(gate.better)}</th>
            <td>promoted in at least {percent(gate.power)} of cases</td>
          </tr>
        </tbody>
      </table>
    </section>
  );
}

/** An interval on an axis, with the values that it is compared with. */
function Range({ value, low, high, marks }: { value: number; low: number; high: number; marks: [number, string, string][] }): JSX.Element {
  const all = [low, high, ...marks.map(([at]) => at)];
  const [least, most] = [Math.min(...all), Math.max(...all)];
  const x = (at: number): number => 30 + ((at - least) / (most - least || 1)) * 340;
  return (
    <svg class="range" viewBox="0 0 400 60" role="img" aria-label={`${rise(value)}, interval ${interval(low, high)}`}>
      <line x1="30" x2="370" y1="30" y2="30" />
      {marks.map(([at, name, side]) => (
        <g key={at}>
          <line class={at === 0 ? "" : "mark"} x1={x(at)} x2={x(at)} y1="16" y2="44" />
          <text x={x(at)} y="56" class={side}>
            {name}
          </text>
        </g>
      ))}
      <line class="bar-line" x1={x(low)} x2={x(high)} y1="30" y2="30" />
      <circle cx={x(value)} cy="30" r="5" />
      <text x={x(value)} y="12">
        {rise(value)}
      </text>
    </svg>
  );
}

function Guardrails({ rows }: { rows: GuardrailRow[] }): JSX.Element {
  return (
    <section class="card" aria-label="guardrails">
      <h2>Guardrails</h2>
      <div class="scroll" role="group" aria-label="guardrails" tabIndex={0}>
        <table class="by-agent">
          <thead>
            <tr>
              <th>counts</th>
              <th>state</th>
              <th class="num">worse by, 95 %</th>
              <th class="num">at most</th>
              <th class="num">conversations</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr key={row.name}>
                <th scope="row" class="breaks">{row.name}</th>
                <td>{row.alarm ? <Chip kind="bad">alarm</Chip> : row.difference === null ? <Chip kind="quiet">too few</Chip> : row.difference > row.bound ? <Chip kind="busy">above its bound so far</Chip> : <Chip>within</Chip>}</td>
                <td class="num">
                  <b>{rise(row.difference)}</b> <small>{interval(row.low, row.high)}</small>
                </td>
                <td class="num">{rise(row.bound)}</td>
                <td class="num">
                  {number(row.candidate)} and {number(row.stable)}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Shadow({ shadow }: { shadow: ShadowRow }): JSX.Element {
  const { judge } = shadow;
  return (
    <section class="card" aria-label="shadow">
      <h2>Shadow</h2>
      <p class="facts">
        <span>
          <b>{number(shadow.copies)}</b> copies of {count(shadow.conversations, "conversation")}
        </span>
        <span>
          <b>{number(shadow.failed)}</b> failed
        </span>
        <span>
          <b>{number(shadow.dropped)}</b> dropped
        </span>
        <span>
          <b>{number(shadow.off_path)}</b> not copied after other tool calls
        </span>
      </p>
      <div class="scroll" role="group" aria-label="shadow" tabIndex={0}>
        <table class="by-agent">
          <thead>
            <tr>
              <th>compared</th>
              <th class="num">candidate</th>
              <th class="num">stable policy</th>
            </tr>
          </thead>
          <tbody>
            {shadow.agreement.map((row) => (
              <tr key={row.kind}>
                <th scope="row">{row.kind}</th>
                <td class="num" colSpan={2}>
                  <b>{row.mean === null ? "–" : percent(row.mean)}</b> <small>{row.low === null || row.high === null ? "" : `${percent(row.low)} to ${percent(row.high)}`}, {number(row.n)} answers</small>
                </td>
              </tr>
            ))}
            {judge && (
              <tr>
                <th scope="row">judge, candidate minus stable policy</th>
                <td class="num" colSpan={2}>
                  <b class={toneOf(judge)}>{rise(judge.difference)}</b>{" "}
                  <small>
                    {interval(judge.low, judge.high)}, {number(judge.n)} answers{judge.failed > 0 && `, ${judge.failed} not judged: ${judge.error}`}
                  </small>
                </td>
              </tr>
            )}
            {shadow.rules.map((row) => (
              <tr key={row.name}>
                <th scope="row">{row.name}</th>
                <td class="num">{row.candidate === null ? "–" : percent(row.candidate)}</td>
                <td class="num">{row.stable === null ? "–" : percent(row.stable)}</td>
              </tr>
            ))}
            {shadow.costs.map((row) => (
              <tr key={row.name}>
                <th scope="row">{row.name}</th>
                <td class="num">{number(row.candidate, 2)}</td>
                <td class="num">{number(row.stable, 2)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

/** What changes the deployment in a terminal; on a server only what its page cannot do. */
function Terminal({ page, found }: { page: DeploymentPage; found: FindingsPage | null }): JSX.Element {
  const { agent, newest, tried, dropped, previous, needs_approval } = page.row;
  const server = page.acts ? location.origin : "URL";
  const returns = dropped && previous !== null; // from the last promotion, which the page does not offer
  const act = (what: string): string => `lightning-rl deploy ${what} --agent ${quoted(agent)} --store ${quoted(page.store)}`;
  const lines: string[] = [];
  if (!page.acts && newest.stage === "candidate") lines.push(act("shadow --share 20%"));
  if (!page.acts && tried) lines.push(act("canary --share 5%"));
  if (newest.stage === "canary" && needs_approval && found?.approval === null) lines.push(`lightning-rl deploy approve ${quoted(agent)} --candidate ${quoted(newest.candidate ?? "")} --store ${server} --key-file approver.key`);
  if (!page.acts && newest.stage === "canary") lines.push(act("promote"));
  if (returns) lines.push(page.acts ? `lightning-rl deploy rollback --last-promotion --reason TEXT --agent ${quoted(agent)} --store ${server} --key-file deployer.key` : act("rollback --last-promotion --reason TEXT"));
  else if (!page.acts && (tried || previous !== null)) lines.push(act("rollback --reason TEXT"));
  return (
    <Commands title={page.acts && !returns ? "Approve it in a terminal" : "Change it in a terminal"} lines={lines}>
      {returns ? `The candidate was rolled back already. This returns from the last promotion to ${previous}.` : page.acts ? "An approval needs an approver's key." : "Only the pages of lightning-rl server change deployments. These pages only read."}
    </Commands>
  );
}

/** The transitions, the newest first. They never change, so those that were read once stay. */
function History({ run, page }: { run: string; page: DeploymentPage }): JSX.Element {
  const [known, setKnown] = useState<Map<number, TransitionRow>>(new Map());
  const [error, setError] = useState("");
  const add = (rows: TransitionRow[]): void => setKnown((before) => new Map([...before, ...rows.map((row) => [row.number, row] as const)]));
  useEffect(() => add(page.history), [page.history]);
  const rows = [...known.values()].sort((a, b) => b.number - a.number);
  const gap = rows.find((row, at) => row.number > 1 && rows[at + 1]?.number !== row.number - 1);
  const more = (before: number): void => {
    get<DeploymentPage>("deployment", { run, agent: page.row.agent, before, limit: 200 })
      .then((older) => add(older.history))
      .catch((problem: Error) => setError(problem.message));
  };
  return (
    <>
      <h2>History</h2>
      <div class="scroll" role="group" aria-label="history" tabIndex={0}>
        <table class="rows">
          <thead>
            <tr>
              <th class="num">no.</th>
              <th>when</th>
              <th>stage</th>
              <th>stable policy</th>
              <th>candidate</th>
              <th class="num">share</th>
              <th>who</th>
              <th>why</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr key={row.number}>
                <td class="num">{row.number}</td>
                <td>{when(row.at_s)}</td>
                <td>{row.stage.replace("_", " ")}</td>
                <td class="policy">{row.stable}</td>
                <td class="policy">{row.candidate ?? ""}</td>
                <td class="num">{row.share > 0 ? percent(row.share) : "–"}</td>
                <td>{row.actor}</td>
                <td class="why">
                  {row.reason} {row.note && <Chip kind="quiet">{row.note}</Chip>}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {error && <p class="note bad">{error}</p>}
      {gap && (
        <button type="button" onClick={() => more(gap.number)}>
          Show {number(Math.min(200, page.transitions - known.size))} more of {number(page.transitions)}
        </button>
      )}
    </>
  );
}
