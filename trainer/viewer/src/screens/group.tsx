// A group side by side: where its rollouts part, what each did then, and what it was worth.
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { get, useUntil, type Event, type GroupPage, type Loaded, type Member } from "../api";
import { useFlag, useParam } from "../params";
import { Agent, count, go, href, hue, isOpen, number, Rewards, shade, Show, Signed, Status, stepHref, Toggle, useKeys } from "../ui";
import { stepName } from "./picker";
import { EventCard } from "./rollout";

export function Group({ run, group, tick }: { run: string; group: string; tick: number }): JSX.Element {
  const page = useGroup(run, group, tick);
  return <Show of={page}>{(data) => <Side run={run} first={data} />}</Show>;
}

/** A group page with all that are in it so far: the first ones show at once, and what goes on is read again. */
export function useGroup(run: string, group: string, tick = 0): Loaded<GroupPage> {
  const first = useUntil<GroupPage>("group", { run, group }, tick, (data) => !data.members.some((member) => isOpen(member.row.status)));
  const [whole, setWhole] = useState<GroupPage | null>(null);
  useEffect(() => {
    const stop = new AbortController();
    const more = async (found: GroupPage): Promise<void> => {
      while (found.next !== null && found.next !== undefined) {
        const page: GroupPage = await get<GroupPage>("group", { run, group, after: found.next }, stop.signal);
        found = { ...page, alike: Math.min(found.alike, page.alike), members: [...found.members, ...page.members] };
        setWhole(found);
      }
    };
    setWhole(first.data);
    if (first.data) more(first.data).catch(() => undefined);
    return () => stop.abort();
  }, [first.data]);
  return { ...first, data: whole?.group_id === group ? whole : first.data };
}

/** The best first: that whose agent with the lowest reward has the most. */
export const bestFirst = (a: Member, b: Member): number => (b.row.lowest ?? Number.NEGATIVE_INFINITY) - (a.row.lowest ?? Number.NEGATIVE_INFINITY) || (b.row.reward ?? 0) - (a.row.reward ?? 0);

/** What happened from each call to the next: rows of the comparison. */
export function turns(events: Event[]): Event[][] {
  const rows: Event[][] = [];
  for (const event of events) {
    if (event.turn !== null || rows.length === 0) rows.push([]);
    rows.at(-1)?.push(event);
  }
  return rows;
}

/** Put rollouts that said, heard and earned the same into one column, and name the others. */
function folded(members: Member[], fold: boolean): { columns: Member[]; twins: Map<string, string[]> } {
  const first = new Map<string, string>();
  const twins = new Map<string, string[]>();
  const columns = members.filter((member) => {
    const did = JSON.stringify([member.row.reward, member.row.status, member.events.map((e) => [e.agent, e.said, e.answer, e.error])]);
    const known = fold ? first.get(did) : undefined;
    if (known === undefined) first.set(did, member.row.rollout_id);
    else twins.set(known, [...(twins.get(known) ?? []), member.row.rollout_id]);
    return known === undefined;
  });
  return { columns, twins };
}

const asked = (event: Event | undefined): string => JSON.stringify(event?.said ?? []);

function Side({ run, first }: { run: string; first: GroupPage }): JSX.Element {
  const [fold, setFold] = useFlag("fold", true);
  const [order, setOrder] = useParam("order", "best");
  useKeys({ u: () => go(stepHref(run, "step", first.mode, first.step ?? 0)) });
  const ordered = order === "best" ? [...first.members].sort(bestFirst) : first.members;
  const { columns, twins } = folded(ordered, fold);
  const rows = columns.map((member) => turns(member.events));
  const shared = rows.length > 1 ? first.alike : 0;
  const prompt = rows[0]?.[shared]?.[0];
  const samePrompt = prompt !== undefined && rows.every((each) => asked(each[shared]?.[0]) === asked(prompt) && each[shared]?.[0]?.agent === prompt.agent);
  const depth = Math.max(0, ...rows.map((each) => each.length));
  return (
    <>
      <div class="head">
        <p class="crumbs">
          <a href={stepHref(run, "step", first.mode, first.step ?? 0)}>{stepName(first.mode, first.step)}</a>
        </p>
        <h1>
          <span class="task">{first.task.slice(0, 400) || first.group_id}</span>
        </h1>
        <a class="button" href={href("run", run, "tries", first.group_id)}>
          before and after
        </a>
        <label>
          order{" "}
          <select value={order} onChange={(e) => setOrder(e.currentTarget.value)}>
            <option value="best">best first, by the lowest reward of any agent</option>
            <option value="run">as run</option>
          </select>
        </label>
      </div>
      <p class="facts">
        <span>
          <Toggle on={fold} onClick={() => setFold(!fold)} title="Show rollouts that did and earned the same once">
            fold those that did the same
          </Toggle>
        </span>
        <span>
          mean <b>{number(first.mean)}</b> ± {number(first.deviation, 2)}
        </span>
        <span>
          <b>{first.total}</b> rollouts
        </span>
        <span>{columns.length === 1 && first.members.length > 1 ? "all did the same" : shared > 0 ? `alike for ${count(shared, "call")}` : "they part at the first call"}</span>
      </p>
      {shared > 0 && rows[0] && (
        <details class="card">
          <summary>{count(shared, "call")} that all have in common</summary>
          {rows[0].slice(0, shared).flat().map((event) => (
            <div key={event.span_id} class={`event ${hue(event.agent)}`}>
              <EventCard event={event} address={null} brief />
            </div>
          ))}
        </details>
      )}
      {samePrompt && prompt && (
        <details class="card" open={(prompt.said ?? []).length < 4}>
          <summary>
            All were asked the same here: <Agent name={prompt.agent} />
          </summary>
          <EventCard event={{ ...prompt, answer: [], credit: null, advantage: null, left_out: null, response_tokens: null, prompt_tokens: null, rewards: [], error: null, finish: null }} address={null} brief />
        </details>
      )}
      <div class="scroll side">
        <table style={{ minWidth: `${columns.length * 19}rem` }}>
          <thead>
            <tr>
              {columns.map((member) => (
                <th key={member.row.rollout_id} scope="col">
                  <a class={`cell ${shade(member.row.reward)}`} href={href("run", run, "rollout", member.row.rollout_id)}>
                    {number(member.row.reward)}
                  </a>
                  <Status row={member.row} />
                  {(twins.get(member.row.rollout_id) ?? []).map((twin) => (
                    <a key={twin} class="twin" href={href("run", run, "rollout", twin)} title={twin}>
                      {ordered.findIndex((each) => each.row.rollout_id === twin) + 1}
                    </a>
                  ))}
                  {(twins.get(member.row.rollout_id) ?? []).length > 0 && <small> did the same: {count((twins.get(member.row.rollout_id) ?? []).length + 1, "rollout")}</small>}
                  <div>
                    {Object.entries(member.advantages).map(([name, value]) => (
                      <small key={name} title="mean advantage of its calls">
                        <Agent name={name || null} /> <Signed value={value} />
                      </small>
                    ))}
                  </div>
                  <div>
                    <Rewards rewards={member.rewards} />
                  </div>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {Array.from({ length: Math.max(0, depth - shared) }, (_, at) => (
              <tr key={at}>
                {columns.map((member, column) => {
                  const events = rows[column]?.[shared + at] ?? [];
                  return (
                    <td key={member.row.rollout_id}>
                      {events.map((event) => (
                        <div key={event.span_id} class={`event ${hue(event.agent)}`}>
                          <EventCard
                            event={at === 0 && samePrompt && event.turn !== null ? { ...event, said: [] } : event}
                            address={event.turn !== null ? href("run", run, "call", member.row.rollout_id, member.row.attempt_id ?? "", event.span_id) : null}
                            brief
                          />
                        </div>
                      ))}
                      {events.length === 0 && at > 0 && (rows[column]?.length ?? 0) === shared + at && <span class="dim">ended</span>}
                    </td>
                  );
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
