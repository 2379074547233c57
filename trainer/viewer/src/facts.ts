// What a step's screen reads: its groups page by page, and what is counted in the traces of their rollouts.
import { useEffect, useRef, useState } from "preact/hooks";
import { get, type Facts, type GroupRow, type RolloutRow, type StepPage } from "./api";

/** All groups of a step, page by page, so that the first ones show at once. */
export function useGroups(run: string, mode: string, step: number, tick: number): { groups: GroupRow[]; total: number | null; error: Error | null } {
  const [groups, setGroups] = useState<GroupRow[]>([]);
  const [total, setTotal] = useState<number | null>(null);
  const [error, setError] = useState<Error | null>(null);
  useEffect(() => {
    const stop = new AbortController();
    const read = async (): Promise<void> => {
      const found: GroupRow[] = [];
      let after: number | null = 0;
      while (after !== null && !stop.signal.aborted) {
        const page: StepPage = await get<StepPage>("step", { run, mode, step, after, limit: 50 }, stop.signal);
        found.push(...page.groups);
        after = page.next ?? null;
        if (tick === 0 || after === null) setGroups([...found]);
        setTotal(page.total);
      }
    };
    read().catch((problem: Error) => !stop.signal.aborted && setError(problem));
    return () => stop.abort();
  }, [run, mode, step, tick]);
  return { groups, total, error };
}

/** What is counted in traces comes in after the rewards, some rollouts at a time, and again of those that went on. */
export function useFacts(run: string, rollouts: RolloutRow[], text: string, tick: number): { facts: Map<string, Facts>; done: boolean } {
  const [facts, setFacts] = useState<Map<string, Facts>>(new Map());
  const [done, setDone] = useState(false);
  const known = useRef({ text: "", stood: new Map<string, string>(), facts: new Map<string, Facts>() });
  const stands = (row: RolloutRow): string => `${row.status}/${row.attempts}`;
  const key = rollouts.map((row) => `${row.rollout_id}/${stands(row)}`).join("|");
  useEffect(() => {
    const stop = new AbortController();
    if (known.current.text !== text) known.current = { text, stood: new Map(), facts: new Map() };
    const { stood, facts: found } = known.current;
    const wanted = rollouts.filter((row) => row.status === "running" || stood.get(row.rollout_id) !== stands(row));
    const read = async (): Promise<void> => {
      for (let at = 0; at < wanted.length && !stop.signal.aborted; at += 24) {
        const some = wanted.slice(at, at + 24);
        const fresh = new Map<string, Facts>();
        for (const each of await get<Facts[]>("facts", { run, rollout: some.map((row) => row.rollout_id), text }, stop.signal)) {
          const before = fresh.get(each.rollout_id);
          fresh.set(each.rollout_id, before ? { ...each, found: each.found || before.found } : each);
        }
        for (const row of some) stood.set(row.rollout_id, stands(row));
        for (const [id, each] of fresh) found.set(id, each);
        setFacts(new Map(found));
      }
      setDone(true);
    };
    if (rollouts.some((row) => !found.has(row.rollout_id))) setDone(false);
    if (rollouts.length) read().catch(() => !stop.signal.aborted && setDone(true));
    return () => stop.abort();
  }, [run, key, text, tick]);
  return { facts, done };
}
