// The same task at two times, side by side: before training and after, at two steps, by both sides of an evaluation.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useGet, type Member, type TriedGroup, type TriesPage } from "../api";
import { useFlag, useParam } from "../params";
import { count, go, href, hue, number, Rewards, Show, Signed, Status, useKeys } from "../ui";
import { Commands } from "./commands";
import { bestFirst, turns, useGroup } from "./group";
import { stepName } from "./picker";
import { EventCard } from "./rollout";

const when = (group: TriedGroup): string => (group.mode === "train" || group.mode === "val" ? stepName(group.mode, group.step) : group.name);

const change = (groups: TriedGroup[]): number | null => {
  const [first, last] = [groups[0]?.mean ?? null, groups.at(-1)?.mean ?? null];
  return first === null || last === null ? null : last - first;
};

export function Tries({ run, tick }: { run: string; tick: number }): JSX.Element {
  const [worse, setWorse] = useFlag("worse");
  const [place, setPlace] = useParam("after", "0");
  const after = Number(place) || 0;
  const setAfter = (at: number): void => setPlace(String(at));
  const page = useGet<TriesPage>("tries", { run, worse, after }, tick);
  return (
    <>
      <div class="head">
        <h1>Before and after</h1>
        <label>
          order{" "}
          <select
            value={worse ? "worse" : "better"}
            onChange={(e) => {
              setAfter(0);
              setWorse(e.currentTarget.value === "worse");
            }}
          >
            <option value="better">most improved first</option>
            <option value="worse">most worsened first</option>
          </select>
        </label>
      </div>
      <Show of={page}>
        {(data) =>
          data.total === 0 ? (
            <p class="note">
              No task of this run was run twice. Give <code>--val</code> to <code>lightning-rl train</code>: held-out tasks are run with the base model and with the tuned one. Or
              look at an evaluation with <code>--against</code>.
            </p>
          ) : (
            <>
              <p class="dim">{count(data.total, "task")} that {data.total === 1 ? "was" : "were"} run at several times. A click shows two times side by side.</p>
              <div class="scroll">
                <table class="rows">
                  <thead>
                    <tr>
                      <th>task</th>
                      <th class="num">first</th>
                      <th class="num">last</th>
                      <th class="num">change</th>
                      <th class="num">times</th>
                    </tr>
                  </thead>
                  <tbody>
                    {data.tasks.map((task) => (
                      <tr key={task.groups[0]?.group_id}>
                        <td>
                          <a href={href("run", run, "tries", task.groups[0]?.group_id ?? "", task.groups.at(-1)?.group_id ?? "")}>{task.task || "a task without a text"}</a>
                        </td>
                        <td class="num" title={task.groups[0] && when(task.groups[0])}>
                          {task.groups[0]?.mean === null ? "none succeeded" : number(task.groups[0]?.mean)}
                        </td>
                        <td class="num" title={when(task.groups[task.groups.length - 1] as TriedGroup)}>
                          {task.groups.at(-1)?.mean === null ? "none succeeded" : number(task.groups.at(-1)?.mean)}
                        </td>
                        <td class="num">
                          <Signed value={change(task.groups)} />
                        </td>
                        <td class="num">{task.groups.length}</td>
                      </tr>
                    ))}
                  </tbody>
                </table>
              </div>
              <p class="bar">
                <button type="button" disabled={after === 0} onClick={() => setAfter(Math.max(0, after - 50))}>
                  before
                </button>
                <button type="button" disabled={data.next === null} onClick={() => setAfter(data.next ?? 0)}>
                  more
                </button>
              </p>
            </>
          )
        }
      </Show>
    </>
  );
}

export function Try({ run, left, right }: { run: string; left: string; right: string }): JSX.Element {
  const known = useGet<TriesPage>("tries", { run, group: left });
  useKeys({ u: () => go(href("run", run, "tries")) });
  return (
    <Show of={known}>
      {(data) => {
        const groups = data.tasks[0]?.groups ?? [];
        const other = right || groups.filter((each) => each.group_id !== left).at(-1)?.group_id || left;
        return (
          <>
            <div class="head">
              <p class="crumbs">
                <a href={href("run", run, "tries")}>before and after</a>
              </p>
              <h1>
                <span class="task">{data.tasks[0]?.task}</span>
              </h1>
            </div>
            {groups.length < 2 && <p class="note">This task was run once so far. The commands below run it with both models.</p>}
            <div class="two pair">
              <Half key={`a${left}`} run={run} group={left} groups={groups} name="left" onGroup={(id) => go(href("run", run, "tries", id, other))} />
              <Half key={`b${other}`} run={run} group={other} groups={groups} name="right" onGroup={(id) => go(href("run", run, "tries", left, id))} />
            </div>
            <Commands title="Run it now, with the tuned and the base model" lines={data.commands}>
              These pages only read. In a terminal, where the program can be imported:
            </Commands>
          </>
        );
      }}
    </Show>
  );
}

interface HalfProps {
  run: string;
  group: string;
  groups: TriedGroup[];
  name: string;
  onGroup: (id: string) => void;
}

function Half({ run, group, groups, name, onGroup }: HalfProps): JSX.Element {
  const page = useGroup(run, group);
  const [at, setAt] = useState(0);
  return (
    <section class="card" aria-label={name}>
      <p class="bar">
        <select aria-label={`time, ${name}`} value={group} onChange={(e) => onGroup(e.currentTarget.value)}>
          {groups.map((each) => (
            <option key={each.group_id} value={each.group_id}>
              {when(each)}
              {each.mean === null ? "" : `: mean ${number(each.mean)}`}
            </option>
          ))}
        </select>
        <a href={href("run", run, "group", group)}>whole group</a>
      </p>
      <Show of={page}>
        {(data) => {
          const members = [...data.members].sort(bestFirst);
          const member = members[Math.min(at, members.length - 1)];
          return (
            <>
              <p class="bar" role="group" aria-label={`rollouts, ${name}, best first`}>
                {members.map((each, place) => (
                  <button type="button" key={each.row.rollout_id} class="toggle" aria-pressed={each === member} onClick={() => setAt(place)}>
                    {number(each.row.reward)}
                  </button>
                ))}
                {data.members.length < data.total && <span class="dim">the first {data.members.length} of {data.total}</span>}
              </p>
              {member && <Went run={run} member={member} />}
            </>
          );
        }}
      </Show>
    </section>
  );
}

function Went({ run, member }: { run: string; member: Member }): JSX.Element {
  return (
    <>
      <p class="facts">
        <a href={href("run", run, "rollout", member.row.rollout_id)}>this rollout</a> <Status row={member.row} /> <Rewards rewards={member.rewards} />
      </p>
      {turns(member.events)
        .flat()
        .map((event) => (
          <div key={event.span_id} class={`event ${hue(event.agent)}`}>
            <EventCard event={event} address={event.turn !== null ? href("run", run, "call", member.row.rollout_id, member.row.attempt_id ?? "", event.span_id) : null} brief />
          </div>
        ))}
      {member.events.length === 0 && <p class="dim">Nothing was recorded of it.</p>}
    </>
  );
}
