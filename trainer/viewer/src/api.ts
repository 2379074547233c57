// What the server answers, typed by its own OpenAPI description, and how it is asked.
import { useEffect, useRef, useState } from "preact/hooks";
import type { components } from "./schema";

type Schemas = components["schemas"];
export type RunRow = Schemas["RunRow"];
export type RunPage = Schemas["RunPage"];
export type StepPage = Schemas["StepPage"];
export type StepRow = Schemas["StepRow"];
export type GroupRow = Schemas["GroupRow"];
export type RolloutRow = Schemas["RolloutRow"];
export type Facts = Schemas["Facts"];
export type GroupPage = Schemas["GroupPage"];
export type Member = Schemas["Member"];
export type RolloutPage = Schemas["RolloutPage"];
export type Event = Schemas["Event"];
export type MessageView = Schemas["MessageView"];
export type CallPage = Schemas["CallPage"];
export type CallLink = Schemas["CallLink"];
export type Token = Schemas["Token"];
export type AccountPage = Schemas["AccountPage"];
export type CreditPage = Schemas["CreditPage"];
export type RewardsPage = Schemas["RewardsPage"];
export type Judgement = Schemas["Judgement"];
export type RewardRow = Schemas["RewardRow"];
export type ToolsPage = Schemas["ToolsPage"];
export type FleetPage = Schemas["FleetPage"];
export type DeploymentsPage = Schemas["DeploymentsPage"];
export type DeploymentPage = Schemas["DeploymentPage"];
export type DeploymentRow = Schemas["DeploymentRow"];
export type TransitionRow = Schemas["TransitionRow"];
export type FindingsPage = Schemas["FindingsPage"];
export type GateRow = Schemas["GateRow"];
export type GuardrailRow = Schemas["GuardrailRow"];
export type ShadowRow = Schemas["ShadowRow"];
export type LoopRow = Schemas["LoopRow"];
export type LoosePage = Schemas["LoosePage"];
export type SearchPage = Schemas["SearchPage"];
export type TriedGroup = Schemas["TriedGroup"];
export type TriesPage = Schemas["TriesPage"];
export type ScalePage = Schemas["ScalePage"];
export type MarkRow = Schemas["MarkRow"];
export type MarksPage = Schemas["MarksPage"];
export type HeldOut = Schemas["HeldOut"];
export type PolicyRow = Schemas["PolicyRow"];
export type UsageRow = Schemas["UsageRow"];
export type ToolRow = Schemas["ToolRow"];
export type Percentiles = Schemas["Percentiles"];

export type Params = Record<string, string | number | boolean | string[] | null | undefined>;

const KEY = "lightning-rl-key";

/** Take the key out of the address, where it would stay in the history, and keep it for this tab; false: there is none. */
export function takeKey(): boolean {
  const found = /^#key=(.+)$/.exec(location.hash);
  if (!found?.[1]) return false;
  sessionStorage.setItem(KEY, found[1]);
  history.replaceState(null, "", `${location.pathname}#/`);
  return true;
}

export const setKey = (key: string): void => sessionStorage.setItem(KEY, key.trim());

const headers = (): HeadersInit => {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
};

export class RefusedError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

export async function get<T>(path: string, params: Params = {}, signal?: AbortSignal): Promise<T> {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (Array.isArray(value)) value.forEach((each) => query.append(name, each));
    else if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  }
  return read<T>(await fetch(`../api/view/${path}?${query}`, { headers: headers(), signal: signal ?? null }));
}

async function read<T>(answer: Response): Promise<T> {
  const body = await answer.json();
  if (!answer.ok) throw new RefusedError(answer.status, body?.error?.message ?? `the server answered ${answer.status}`);
  return body as T;
}

export async function post<T>(path: string, body: object): Promise<T> {
  return read<T>(await fetch(`../api/view/${path}`, { method: "POST", headers: { ...headers(), "Content-Type": "application/json" }, body: JSON.stringify(body) }));
}

export interface Action {
  agent: string;
  action: "shadow" | "canary" | "promote" | "rollback";
  number: number; // of the newest transition that the person has seen
  reason: string;
  share?: number;
  outcomes?: string[];
  guards?: Record<string, number>;
}

/** Change a deployment, with a key of the person who does: it is sent with this request and stored nowhere. */
export async function act(action: Action, key: string): Promise<void> {
  const lost = (): never => {
    throw new Error("The server did not answer, so the change may have been made or not. Look at the history before you try again.");
  };
  await read(await fetch("../api/deployments/act", { method: "POST", headers: { Authorization: `Bearer ${key}`, "Content-Type": "application/json" }, body: JSON.stringify(action) }).catch(lost));
}

export interface Loaded<T> {
  data: T | null;
  error: Error | null;
  loading: boolean;
}

/** Ask for something, and ask again when `tick` changes; what was there stays until the new answer comes. */
export function useGet<T>(path: string | null, params: Params, tick = 0): Loaded<T> {
  const [state, setState] = useState<Loaded<T>>({ data: null, error: null, loading: true });
  const key = JSON.stringify([path, params]);
  const shown = useRef("");
  useEffect(() => {
    if (path === null) return;
    const stop = new AbortController();
    const same = shown.current === key;
    setState((before) => ({ data: same ? before.data : null, error: null, loading: true }));
    get<T>(path, params, stop.signal)
      .then((data) => {
        shown.current = key;
        setState({ data, error: null, loading: false });
      })
      .catch((error: Error) => {
        if (!stop.signal.aborted) setState((before) => ({ data: before.data, error, loading: false }));
      });
    return () => stop.abort();
  }, [key, tick]);
  return state;
}

/** The same, of something that is asked for again at each tick until it is done. */
export function useUntil<T>(path: string | null, params: Params, tick: number, done: (data: T) => boolean): Loaded<T> {
  const [over, setOver] = useState(false);
  const [last, setLast] = useState(tick);
  const page = useGet<T>(path, params, over ? last : tick);
  useEffect(() => {
    if (page.data === null) return;
    setLast(tick);
    setOver(done(page.data));
  }, [page.data]);
  return page;
}

/** What is known of a run: whether something is at work on it, and whether the server that says so answers. */
export type State = "running" | "stopped" | "idle" | "not connected";

interface Told {
  first: boolean;
  state: State;
}

/** The events in a stream of the server's, with what is left of the last, which has not ended. */
function eventsIn(text: string): { told: Told[]; rest: string } {
  const parts = text.split("\n\n");
  const rest = parts.pop() ?? "";
  const data = parts.flatMap((part) => part.split("\n").filter((line) => line.startsWith("data: ")));
  return { told: data.map((line) => JSON.parse(line.slice(6)) as Told), rest };
}

/** Count the server's word that something was written; between two counts pass two seconds at least. */
export function useChanges(run: string | null): { tick: number; state: State | null } {
  const [tick, setTick] = useState(0);
  const [state, setState] = useState<State | null>(null);
  useEffect(() => {
    setState(null);
    if (run === null) return;
    const stop = new AbortController();
    let last = 0;
    let again = false; // what was written while nobody told is asked for once somebody does
    let waiting: ReturnType<typeof setTimeout> | undefined;
    const changed = (): void => {
      clearTimeout(waiting);
      waiting = setTimeout(
        () => {
          last = Date.now();
          setTick((before) => before + 1);
        },
        Math.max(0, last + 2000 - Date.now()),
      );
    };
    const listen = async (): Promise<void> => {
      while (!stop.signal.aborted) {
        try {
          const answer = await fetch(`../api/view/events?run=${encodeURIComponent(run)}`, {
            headers: headers(),
            signal: stop.signal,
          });
          if (!answer.ok || !answer.body) return;
          const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
          let text = "";
          for (;;) {
            const { done, value } = await reader.read();
            if (done) break;
            const { told, rest } = eventsIn(text + value);
            text = rest;
            for (const { first, state } of told) {
              setState(state);
              if (!first || again) changed();
              again = false;
            }
          }
        } catch {
          // the server went away: it is asked again below
        }
        if (stop.signal.aborted) return;
        again = true;
        setState("not connected");
        await new Promise((wake) => setTimeout(wake, 3000));
      }
    };
    void listen();
    return () => {
      stop.abort();
      clearTimeout(waiting);
    };
  }, [run]);
  return { tick, state };
}
