// The form by which a person changes a deployment. The server checks everything again, and refuses what has changed.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { act, type Action, type DeploymentPage } from "../api";
import { Toggle } from "../ui";
import { percent } from "./deployments";

type Kind = Action["action"];

let key = ""; // of this person, in memory only: it is gone when the page is closed or loaded again

const LABELS: Record<Kind, string> = { shadow: "Shadow", canary: "Canary", promote: "Promote", rollback: "Roll back" };
const FIRST: Partial<Record<Kind, string>> = { shadow: "20", canary: "5" };

const possible = ({ row }: DeploymentPage): Kind[] => {
  const { stage } = row.newest;
  const kinds: Kind[] = [];
  if (stage === "candidate" || stage === "shadow") kinds.push("shadow");
  if (row.tried) kinds.push("canary");
  if (stage === "canary") kinds.push("promote");
  if (row.tried || (row.previous !== null && !row.dropped)) kinds.push("rollback");
  return kinds;
};

/** What will be true afterwards. */
function effect(kind: Kind, page: DeploymentPage, share: string): string {
  const { stable, candidate } = page.row.newest;
  switch (kind) {
    case "shadow":
      return `${candidate} will answer copies of ${share} % of the conversations, which no user sees.`;
    case "canary":
      return `${candidate} will answer ${share} % of the conversations, and ${stable} the others.`;
    case "promote":
      return `${candidate} will answer all conversations, if gate, guardrails, program, blocks and a needed approval permit it.`;
    default:
      return page.row.tried ? `${stable} will answer all conversations.` : `${page.row.previous} will answer all conversations instead of ${stable}.`;
  }
}

const words = (text: string): string[] => text.split(",").map((word) => word.trim()).filter(Boolean);

/** Read bounds such as `failed=2%`; null where one is not a share. */
function bounds(text: string): Record<string, number> | null {
  const found: Record<string, number> = {};
  for (const word of words(text)) {
    const parts = /^(.+)=(\d+(?:\.\d+)?)\s*(%?)$/.exec(word);
    if (!parts) return null;
    found[String(parts[1])] = Number(parts[2]) / (parts[3] ? 100 : 1);
  }
  return found;
}

interface Chosen {
  kind: Kind;
  number: number; // what the person saw when choosing
}

export function Act({ page, done }: { page: DeploymentPage; done: () => void }): JSX.Element | null {
  const [chosen, setChosen] = useState<Chosen | null>(null);
  const [said, setSaid] = useState<{ text: string; bad: boolean } | null>(null);
  const { newest } = page.row;
  const kinds = possible(page);
  if (kinds.length === 0 && said === null && chosen === null) return null;
  const changed = chosen !== null && chosen.number !== newest.number;
  return (
    <section class="card act" aria-label="change it">
      <h2>Change it</h2>
      <p class="bar" role="group" aria-label="actions">
        {kinds.map((kind) => (
          <Toggle key={kind} on={chosen?.kind === kind} onClick={() => (setSaid(null), setChosen({ kind, number: newest.number }))}>
            {LABELS[kind]}
          </Toggle>
        ))}
      </p>
      {changed && (
        <p class="note bad" role="alert">
          {newest.actor} has changed this deployment since you chose. Look at it, and choose again.
        </p>
      )}
      {chosen && !changed && (
        <Form
          key={chosen.kind}
          kind={chosen.kind}
          page={page}
          failed={(text) => setSaid({ text, bad: true })}
          done={() => {
            setSaid({ text: `Done: ${LABELS[chosen.kind].toLowerCase()}.`, bad: false });
            setChosen(null);
            done();
          }}
        />
      )}
      {said && (
        <p class={`note ${said.bad ? "bad" : ""}`} role={said.bad ? "alert" : "status"}>
          {said.text}
        </p>
      )}
    </section>
  );
}

function Form({ kind, page, failed, done }: { kind: Kind; page: DeploymentPage; failed: (text: string) => void; done: () => void }): JSX.Element {
  const [share, setShare] = useState(FIRST[kind] ?? "");
  const [outcomes, setOutcomes] = useState("");
  const [guards, setGuards] = useState("");
  const [reason, setReason] = useState("");
  const [typed, setTyped] = useState(key);
  const [busy, setBusy] = useState(false);
  const first = kind === "canary" && !page.has_gate;
  const submit = (event: SubmitEvent): void => {
    event.preventDefault();
    const guarded = bounds(guards);
    if (guarded === null) return failed("A guardrail is a name with a share, such as failed=2%, slower-than-10=5%.");
    key = typed.trim();
    setBusy(true);
    act(
      {
        agent: page.row.agent,
        action: kind,
        number: page.row.newest.number,
        reason,
        ...(FIRST[kind] ? { share: Number(share) / 100 } : {}),
        ...(first ? { outcomes: words(outcomes), guards: guarded } : {}),
      },
      key,
    )
      .then(done)
      .catch((problem: Error) => failed(problem.message))
      .finally(() => setBusy(false));
  };
  return (
    <form onSubmit={submit}>
      <p class="breaks">{effect(kind, page, share)}</p>
      <div class="bar">
        {FIRST[kind] && (
          <label>
            share, %
            <input name="share" type="number" min="0.1" max="100" step="any" required value={share} onInput={(e) => setShare(e.currentTarget.value)} />
          </label>
        )}
        {first && (
          <>
            <label>
              outcomes that count
              <input name="outcomes" placeholder="all rewards" value={outcomes} onInput={(e) => setOutcomes(e.currentTarget.value)} />
            </label>
            <label>
              guardrails
              <input name="guards" placeholder="failed=2%, slower-than-10=5%" value={guards} onInput={(e) => setGuards(e.currentTarget.value)} />
            </label>
          </>
        )}
        <label>
          reason, for the history
          <input name="reason" maxLength={1000} value={reason} onInput={(e) => setReason(e.currentTarget.value)} />
        </label>
        <label>
          your deployer's key
          <input name="key" type="password" autocomplete="off" required value={typed} onInput={(e) => setTyped(e.currentTarget.value)} />
        </label>
        <button type="submit" disabled={busy}>
          {LABELS[kind]}
        </button>
      </div>
      <p class="dim">
        {first && "The gate's bounds are fixed now: a candidate that is worse by 0.02 is promoted in at most 1 % of cases. Other bounds: lightning-rl deploy canary. "}
        {kind === "canary" && page.has_gate && `The gate stays as it is; the share is ${percent(page.row.newest.share)} now. `}
        The key is made by <code>lightning-rl key deployer --name YOU</code>. This page keeps it in memory only.
      </p>
    </form>
  );
}
