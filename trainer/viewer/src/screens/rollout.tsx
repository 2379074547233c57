// A rollout: swim lanes by agent over time, and the transcript beside them, walked by mouse or keyboard.
import type { JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { useUntil, type Event, type RolloutPage } from "../api";
import { placeOf } from "../marks";
import { useParam } from "../params";
import { MarkButton } from "./marks";
import { stepName } from "./picker";
import { Agent, Chip, Clipped, count, duration, go, href, hue, isOpen, Message, number, Rewards, Show, Signed, stepHref, useKeys } from "../ui";

interface Props {
  run: string;
  rollout?: string;
  trace?: string;
  attempt?: string | null;
  span: string | null;
  tick?: number;
}

export function Rollout({ run, rollout, trace, attempt, span, tick = 0 }: Props): JSX.Element {
  const page = useUntil<RolloutPage>(trace ? "trace" : "rollout", trace ? { run, trace } : { run, rollout, attempt }, tick, (data) => !isOpen(data.status));
  return <Show of={page}>{(data) => <One run={run} page={data} trace={trace} span={span} />}</Show>;
}

const isTool = (event: Event): boolean => event.operation === "execute_tool";
const isVerdict = (event: Event): boolean => event.operation === "evaluate";
const spoken = (event: Event): boolean => event.turn !== null || isTool(event) || isVerdict(event) || event.error !== null;

export const callAddress = (run: string, page: { rollout_id?: string | null; attempt_id?: string | null }, trace: string | undefined, span: string): string =>
  trace ? href("run", run, "tracecall", trace, span) : href("run", run, "call", page.rollout_id ?? "", page.attempt_id ?? "", span);

function One({ run, page, trace, span }: { run: string; page: RolloutPage; trace: string | undefined; span: string | null }): JSX.Element {
  const walked = useMemo(() => page.events.filter(spoken), [page]);
  const [chosen, setChosen] = useState<string | null>(span ?? walked[0]?.span_id ?? null);
  const [find_, setFind] = useParam("find");
  const list = useRef<HTMLOListElement>(null);
  const name = page.rollout_id ?? trace ?? "";
  const at = walked.findIndex((event) => event.span_id === chosen);
  const walk = (by: number): void => setChosen(walked[Math.max(0, Math.min(walked.length - 1, at + by))]?.span_id ?? null);
  const place = page.members.indexOf(page.rollout_id ?? "");
  const member = (by: number): void => {
    const next = page.members[place + by];
    if (next) go(href("run", run, "rollout", next));
  };
  const current = walked[at];
  useKeys({
    j: () => walk(1),
    ArrowDown: () => walk(1),
    k: () => walk(-1),
    ArrowUp: () => walk(-1),
    n: () => member(1),
    p: () => member(-1),
    Enter: () => current?.turn !== null && current !== undefined && go(callAddress(run, page, trace, current.span_id)),
    u: () => go(page.group_id ? href("run", run, "group", page.group_id) : href("run", run, "loose")),
  });
  const first = useRef(true);
  useEffect(() => {
    const holder = list.current;
    const item = holder?.querySelector<HTMLElement>(`[data-span="${CSS.escape(chosen ?? "")}"]`);
    if (item && (!first.current || span)) item.scrollIntoView({ block: "nearest", behavior: "instant" });
    first.current = false;
  }, [chosen]);
  return (
    <>
      <div class="head">
        <p class="crumbs">
          {page.step !== null && page.mode && (
            <a href={stepHref(run, "step", page.mode, page.step)}>{stepName(page.mode, page.step)}</a>
          )}
          {page.group_id && <a href={href("run", run, "group", page.group_id)}>group, side by side</a>}
          {page.group_id && <a href={href("run", run, "tries", page.group_id)}>the task before and after</a>}
          {trace && <a href={href("run", run, "loose")}>traces</a>}
        </p>
        <h1>{page.task ? <span class="task">{page.task.slice(0, 160)}</span> : name}</h1>
        {place >= 0 && (
          <span class="picker">
            <button type="button" aria-label="previous rollout" disabled={place === 0} onClick={() => member(-1)}>
              ‹
            </button>
            rollout {place + 1} of {page.members.length}
            <button type="button" aria-label="next rollout" disabled={place === page.members.length - 1} onClick={() => member(1)}>
              ›
            </button>
          </span>
        )}
        <MarkButton run={run} place={placeOf(page, trace)} />
      </div>
      <p class="facts">
        {page.reward !== null && (
          <span>
            reward <b>{number(page.reward)}</b>
          </span>
        )}
        {page.status && page.status !== "succeeded" && <Chip kind="bad">{page.status}</Chip>}
        <Rewards rewards={page.rewards.filter((each) => each.span_id === null)} />
        <span data-testid="calls">
          <b>{page.calls}</b> {page.calls === 1 ? "model call" : "model calls"}
        </span>
        <span>
          <b>{page.tools}</b> {page.tools === 1 ? "tool call" : "tool calls"}
        </span>
        <span data-testid="spans">
          <b>{page.spans}</b> spans
        </span>
        <span>
          took <b>{duration(page.ms)}</b>
        </span>
        {page.attempts.length > 1 &&
          page.attempts.map((each) => (
            <a key={each.attempt_id} href={href("run", run, "rollout", name, each.attempt_id)} aria-current={each.attempt_id === page.attempt_id ? "page" : undefined}>
              try {each.number}: {each.status}
            </a>
          ))}
      </p>
      {page.attempts
        .filter((each) => each.attempt_id === page.attempt_id && each.error)
        .map((each) => (
          <details key={each.attempt_id} class="note bad" open>
            <summary>{each.error?.trim().split("\n").at(-1)}</summary>
            <pre>{each.error}</pre>
          </details>
        ))}
      {Object.entries(page.unjoined).map(([reason, n]) => (
        <p key={reason} class="note">
          {count(n, "call")}: {reason}
        </p>
      ))}
      {page.spans > page.events.length && (
        <p class="note">
          The first {count(page.events.length, "span")} are shown here, of {number(page.spans)}.
        </p>
      )}
      <div class="rollout">
        <Lanes page={page} chosen={chosen} onChoose={setChosen} />
        <div class="transcript">
          <div class="bar">
            <label class="grow">
              find <input type="search" value={find_} onInput={(e) => setFind(e.currentTarget.value)} />
            </label>
            <small class="dim">
              <kbd>j</kbd> <kbd>k</kbd> walk, <kbd>Enter</kbd> tokens
            </small>
          </div>
          <ol ref={list}>
            {walked.map((event) => (
              <li key={event.span_id} data-span={event.span_id} class={`event ${hue(event.agent)} ${event.span_id === chosen ? "chosen" : ""}`} onClick={() => setChosen(event.span_id)}>
                <EventCard event={event} find={find_.trim() || undefined} address={event.turn !== null ? callAddress(run, page, trace, event.span_id) : null} run={run} />
              </li>
            ))}
          </ol>
          {walked.length === 0 && <p class="note">Nothing was recorded of this attempt.</p>}
        </div>
      </div>
    </>
  );
}

interface Card {
  event: Event;
  address: string | null;
  find?: string | undefined;
  brief?: boolean;
  run?: string;
}

export function EventCard({ event, address, find, brief = false, run = "" }: Card): JSX.Element {
  return (
    <>
      <div class="event-head">
        {!isVerdict(event) && <Agent name={event.agent} />}
        {event.turn !== null ? (
          <b>{address ? <a href={address}>call {event.turn}</a> : `call ${event.turn}`}</b>
        ) : isTool(event) ? (
          <b>tool {event.name}</b>
        ) : (
          <b>{isVerdict(event) ? event.name : `${event.operation} ${event.name}`}</b>
        )}
        {event.prompt_tokens !== null && (
          <small>
            {number(event.prompt_tokens)} → {number(event.response_tokens)} tokens
          </small>
        )}
        {event.version !== null && !brief && <small>weights {event.version}</small>}
        {!brief && !(isVerdict(event) && event.ms === 0) && <small>{duration(event.ms)}</small>}
        {(event.asked ?? []).map((asked) => (
          <a key={asked} href={href("run", run, "trace", asked)}>
            what the judge was asked
          </a>
        ))}
        {event.finish && event.finish !== "stop" && event.finish !== "tool_calls" && <Chip kind="busy">{event.finish}</Chip>}
        {event.credit !== null && <small title="the call's share of the rewards">credit {number(event.credit)}</small>}
        {event.advantage !== null && (
          <small title="how much better than what it was compared with">
            advantage <Signed value={event.advantage} />
          </small>
        )}
        {event.left_out && <Chip kind="quiet">not compared: {event.left_out}</Chip>}
        <Rewards rewards={event.rewards ?? []} />
      </div>
      {event.error && <p class="error">{event.error}</p>}
      {event.known > 0 && !brief && <p class="known">{count(event.known, "message")} of earlier calls go before</p>}
      {(event.said ?? []).map((said, at) => (isTool(event) ? <Tool key={at} text={said.text} cut={said.cut ?? 0} find={find} /> : <Message key={at} said={said} find={find} />))}
      {(event.answer ?? []).map((said, at) => (
        <div key={at} class="answer">
          {isTool(event) ? <Clipped text={said.text || "(no result)"} more={said.cut ?? 0} find={find} /> : <Message said={said} find={find} />}
        </div>
      ))}
    </>
  );
}

const Tool = ({ text, cut, find }: { text: string; cut: number; find: string | undefined }): JSX.Element => (
  <div class="use">
    <code>
      <Clipped text={text || "(no arguments)"} more={cut} find={find} />
    </code>
  </div>
);

interface Bar {
  event: Event;
  level: number;
}

function Lanes({ page, chosen, onChoose }: { page: RolloutPage; chosen: string | null; onChoose: (span: string) => void }): JSX.Element {
  const lanes = useMemo(() => {
    const by = new Map<string, Bar[]>();
    const ends = new Map<string, number[]>();
    for (const event of page.events) {
      const agent = event.agent ?? "";
      const bars = by.get(agent) ?? [];
      const levels = ends.get(agent) ?? [];
      // The first level that is free again: what is nested or beside lies below.
      const gap = page.ms / 400;
      let level = levels.findIndex((end) => end <= event.start_ms - gap * 0.2);
      if (level < 0) level = levels.length;
      levels[level] = Math.max(event.start_ms + event.ms, event.start_ms + gap);
      bars.push({ event, level });
      by.set(agent, bars);
      ends.set(agent, levels);
    }
    return [...by].map(([agent, bars]) => ({ agent, bars, levels: Math.min(12, ends.get(agent)?.length ?? 1) }));
  }, [page]);
  const span = page.ms || 1;
  return (
    <div class="lanes" role="group" aria-label="spans over time, a lane for each agent">
      <div class="axis" aria-hidden="true">
        <span>0</span>
        <span>{duration(span / 2)}</span>
        <span>{duration(span)}</span>
      </div>
      {lanes.map(({ agent, bars, levels }) => (
        <div key={agent} class="lane">
          <Agent name={agent || null} />
          <div class="track" style={{ height: `${levels * 20 + 4}px` }}>
            {bars.map(({ event, level }) => (
              <button
                type="button"
                key={event.span_id}
                class={`span ${hue(event.agent)} ${event.turn !== null ? "chat" : isTool(event) ? "tool" : "around"} ${event.error ? "failed" : ""} ${event.span_id === chosen ? "chosen" : ""}`}
                style={{ left: `min(${(event.start_ms / span) * 100}%, 100% - 5px)`, width: `max(5px, ${(event.ms / span) * 100}%)`, top: `${Math.min(level, 11) * 20 + 2}px` }}
                title={`${event.operation} ${event.name}\n${duration(event.ms)}${event.error ? `\n${event.error}` : ""}`}
                aria-label={event.turn !== null ? `${event.turn}: model call` : isTool(event) ? `${event.name}: tool` : `${event.name}: ${event.operation}`}
                tabIndex={-1}
                onClick={() => onChoose(event.span_id)}
              >
                {event.turn !== null ? event.turn : isTool(event) ? event.name : event.name}
              </button>
            ))}
          </div>
        </div>
      ))}
      <p class="keyline">
        <span class="span chat hue-0">0</span> model call <span class="span tool hue-0">t</span> tool <span class="span around hue-0">a</span> agent, workflow <span class="span chat hue-0 failed">0</span> failed
      </p>
    </div>
  );
}
