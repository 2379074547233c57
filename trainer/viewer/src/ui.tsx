// Small parts that every screen is made of. Texts of models are children of elements, never markup.
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import type { Loaded, MessageView, RewardRow, RolloutRow, ScalePage } from "./api";
import { RefusedError, setKey } from "./api";

export const href = (...parts: (string | number)[]): string =>
  `#/${parts.map((part) => encodeURIComponent(String(part))).join("/")}`;

/** The address of a screen of a step. Training steps count from 1 there too; a validation is after this number of steps. */
export const stepHref = (run: string, screen: string, mode: string, step: number): string =>
  href("run", run, screen, ...(screen === "account" || screen === "credit" ? [] : [mode]), mode === "train" ? step + 1 : step);

export const go = (address: string): void => {
  location.hash = address.slice(1);
};

export const number = (value: number | null | undefined, digits = 3): string =>
  value === null || value === undefined
    ? "–"
    : Number.isInteger(value) && Math.abs(value) < 1e7
      ? value.toLocaleString("en")
      : Math.abs(value) >= 1e5 || (Math.abs(value) < 1e-3 && value !== 0)
        ? value.toExponential(2)
        : value.toFixed(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");

export const signed = (value: number | null | undefined): string =>
  value === null || value === undefined ? "–" : `${value > 0 ? "+" : value < 0 ? "−" : "±"}${number(Math.abs(value))}`;

export const duration = (ms: number | null | undefined): string =>
  ms === null || ms === undefined
    ? "–"
    : ms < 1
      ? `${(ms * 1000).toFixed(0)} µs`
      : ms < 1000
        ? `${ms.toFixed(0)} ms`
        : ms < 60_000
          ? `${(ms / 1000).toFixed(1)} s`
          : `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;

/** A reward with as many digits as the sentences about it have. */
export const fixed = (value: number | null | undefined): string => (value === null || value === undefined ? "–" : value.toFixed(3));

/** A large number in three digits. */
export const compact = (value: number): string => value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (n: number, one: string, many = `${one}s`): string => `${number(n)} ${n === 1 ? one : many}`;

const HUES = 8; // that can be told apart by most eyes
const agents = new Map<string, number>();
let ends: [number, number] = [0, 1];

/** Take the colours of a run: one scale of rewards and one colour for each agent, the same on all its screens. */
export function setScale(scale: ScalePage): void {
  ends = [scale.low, scale.high];
  agents.clear();
  scale.agents.forEach((name, at) => agents.set(name, at % HUES));
}

/** The first colour from a name's own on that is not used yet; its own where all are. */
function free(name: string, used: Set<number>): number {
  let sum = 7;
  for (const letter of name) sum = (sum * 31 + letter.charCodeAt(0)) % 9973;
  return Array.from({ length: HUES }, (_, at) => (sum + at) % HUES).find((each) => !used.has(each)) ?? sum % HUES;
}

/** A colour for an agent, the same on every screen; of up to eight no two share one. */
export function hue(name: string | null | undefined): string {
  if (!name) return "hue-none";
  if (!agents.has(name)) agents.set(name, free(name, new Set(agents.values())));
  return `hue-${agents.get(name)}`;
}

/** Colours for names that stand beside each other and are no agents. */
export function hues(names: string[]): string[] {
  const used = new Set<number>();
  return names.map((name) => {
    const own = free(name, used);
    used.add(own);
    return `hue-${own}`;
  });
}

export const Agent = ({ name }: { name: string | null | undefined }): JSX.Element => (
  <span class={`agent ${hue(name)}`}>
    <i aria-hidden="true" />
    {name ?? "no name"}
  </span>
);

export const Signed = ({ value, title }: { value: number | null | undefined; title?: string }): JSX.Element => (
  <span class={`signed ${!value ? "" : value > 0 ? "good" : "bad"}`} title={title}>
    {signed(value)}
  </span>
);

export const Chip = ({ kind = "", children, title }: { kind?: string; children: ComponentChildren; title?: string }): JSX.Element => (
  <span class={`chip ${kind}`} title={title}>
    {children}
  </span>
);

export const isOpen = (status: string): boolean => status === "queued" || status === "running";

export const Status = ({ row }: { row: RolloutRow }): JSX.Element | null =>
  row.status === "succeeded" ? null : (
    <Chip kind={isOpen(row.status) ? "busy" : "bad"} title={row.error ?? ""}>
      {row.kind && row.kind !== row.status ? `${row.status}: ${row.kind}` : row.status}
    </Chip>
  );

export const Rewards = ({ rewards }: { rewards: RewardRow[] }): JSX.Element => (
  <>
    {rewards.map((each, place) => (
      <Chip key={place} kind="reward" title={`given by ${each.source}`}>
        {each.agent ?? "reward"} <b>{number(each.value)}</b> <small>{each.source}</small>
      </Chip>
    ))}
  </>
);

/** The lowest and the highest of any number of values; [Infinity, -Infinity] of none. */
export const extent = (values: number[]): [number, number] =>
  values.reduce<[number, number]>(([low, high], each) => [Math.min(low, each), Math.max(high, each)], [Infinity, -Infinity]);

/** A reward on the run's scale, as a colour from bad over neutral to good. */
export function shade(value: number | null | undefined): string {
  const [low, high] = ends;
  if (value === null || value === undefined) return "shade-none";
  return `shade-${Math.max(0, Math.min(8, Math.round(((value - low) / (high - low)) * 8)))}`;
}

/** What the colours of rewards mean. */
export const ScaleKey = (): JSX.Element => (
  <span class="scale" title="The same colours on all pages of this run">
    {number(ends[0])}
    {Array.from({ length: 9 }, (_, at) => (
      <i key={at} class={`shade-${at}`} aria-hidden="true" />
    ))}
    {number(ends[1])}
  </span>
);

export function Show<T>({ of, children }: { of: Loaded<T>; children: (data: T) => ComponentChildren }): JSX.Element {
  if (of.error instanceof RefusedError && of.error.status === 401) return <AskKey />;
  return (
    <>
      {of.error && (
        <p class="note bad" role="alert">
          {of.error.message}
        </p>
      )}
      {of.data === null && !of.error ? <Waiting /> : null}
      {of.data !== null && children(of.data)}
    </>
  );
}

/** Says that something is on its way, but only when it takes long enough to wonder. */
function Waiting(): JSX.Element {
  const [late, setLate] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => setLate(true), 250);
    return () => clearTimeout(timer);
  }, []);
  return (
    <p class="note" aria-busy="true">
      {late ? "Reading the store …" : ""}
    </p>
  );
}

function AskKey(): JSX.Element {
  const [text, setText] = useState("");
  const submit = (event: SubmitEvent): void => {
    event.preventDefault();
    setKey(text);
    location.reload();
  };
  return (
    <form class="card ask" onSubmit={submit}>
      <h2>This page needs a key</h2>
      <p>
        Recorded prompts and answers are private. <code>lightning-rl view</code> prints an address with a key in it; for a server,{" "}
        <code>lightning-rl key viewer</code> makes one.
      </p>
      <label>
        Key <input type="password" autocomplete="off" value={text} onInput={(e) => setText(e.currentTarget.value)} />
      </label>
      <button type="submit">Open</button>
    </form>
  );
}

const CLIP = 700;

/** A text of any length: its beginning, and the rest on request. */
export function Clipped({ text, more = 0, find }: { text: string; more?: number; find?: string | undefined }): JSX.Element {
  const [whole, setWhole] = useState(false);
  const long = text.length > CLIP + 200;
  const shown = whole || !long ? text : text.slice(0, CLIP);
  return (
    <div class="text">
      <Marked text={shown} find={find} />
      {long && (
        <button type="button" class="link" onClick={() => setWhole(!whole)}>
          {whole ? "show less" : `… ${number(text.length - CLIP)} more characters`}
        </button>
      )}
      {more > 0 && <small class="dim"> ({number(more)} more characters in the call)</small>}
    </div>
  );
}

export function Marked({ text, find }: { text: string; find?: string | undefined }): JSX.Element {
  if (!find) return <>{text}</>;
  const parts: ComponentChildren[] = [];
  const lower = text.toLowerCase();
  const sought = find.toLowerCase();
  let at = 0;
  for (let next = lower.indexOf(sought); next >= 0 && parts.length < 400; next = lower.indexOf(sought, at)) {
    parts.push(text.slice(at, next), <mark>{text.slice(next, next + sought.length)}</mark>);
    at = next + sought.length;
  }
  return (
    <>
      {parts}
      {text.slice(at)}
    </>
  );
}

export function Message({ said, find }: { said: MessageView; find?: string | undefined }): JSX.Element {
  return (
    <div class={`said role-${/^[a-z]+$/.test(said.role) ? said.role : "other"}`}>
      <span class="role">
        {said.role || "text"}
        {said.name ? ` ${said.name}` : ""}
      </span>
      <div>
        {said.reasoning && (
          <details class="reasoning">
            <summary>reasoning, {number(said.reasoning.length)} characters</summary>
            <Clipped text={said.reasoning} find={find} />
          </details>
        )}
        {said.text ? <Clipped text={said.text} more={said.cut ?? 0} find={find} /> : null}
        {(said.calls ?? []).map((use, place) => (
          <div key={place} class="use">
            <b>{use.name}</b>
            <code>
              <Marked text={use.arguments} find={find} />
            </code>
          </div>
        ))}
        {!said.text && !said.reasoning && (said.calls ?? []).length === 0 && <span class="dim">empty</span>}
      </div>
    </div>
  );
}

/** Something to press that leads nowhere new, by mouse or keyboard. */
export const Toggle = ({
  on,
  onClick,
  children,
  title,
}: {
  on: boolean;
  onClick: () => void;
  children: ComponentChildren;
  title?: string;
}): JSX.Element => (
  <button type="button" class="toggle" aria-pressed={on} onClick={onClick} title={title}>
    {children}
  </button>
);

export function useKeys(bound: Record<string, () => void>): void {
  useEffect(() => {
    const press = (event: KeyboardEvent): void => {
      const target = event.target as HTMLElement;
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName)) return;
      if (event.key === "Enter" && target.closest("a, button, summary")) return; // it follows, presses or opens that
      const act = bound[event.key];
      if (act) {
        event.preventDefault();
        act();
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  });
}
