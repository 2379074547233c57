// A model call as tokens, with what is known of each laid over them; as messages; as the request that was sent.
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { useGet, type CallPage, type Token } from "../api";
import { placeOf } from "../marks";
import { useParam } from "../params";
import { Agent, Chip, count, duration, extent, go, href, Message, number, Rewards, Show, Signed, Toggle, useKeys } from "../ui";
import { MarkButton } from "./marks";
import { callAddress } from "./rollout";

type Overlay = "logprob" | "entropy" | "gap" | "mask" | "advantage" | "none";
const OVERLAYS: [Overlay, string, string][] = [
  ["logprob", "log-probability", "of each sampled token under the weights that drew it, as recorded: the darker, the less likely"],
  ["entropy", "entropy", "in nats, of the distribution that each trained token was drawn from, as the update saw it: the darker, the less certain"],
  ["gap", "gap", "log-probability under the trainer less that under the engine that drew the token, as the update saw it; the same weights should agree"],
  ["mask", "mask", "tokens that the loss looks at; in the prompt, those of earlier calls that share this row"],
  ["advantage", "advantage", "what each trained token is pushed by"],
  ["none", "none", "the text alone"],
];

interface Props {
  run: string;
  rollout?: string;
  attempt?: string | null;
  trace?: string;
  span: string;
}

export function Call({ run, rollout, attempt, trace, span }: Props): JSX.Element {
  const [whole, setWhole] = useState(false);
  const page = useGet<CallPage>("call", { run, rollout, attempt, trace, span, whole });
  return <Show of={page}>{(data) => <One run={run} page={data} trace={trace} onWhole={() => setWhole(true)} />}</Show>;
}

function One({ run, page, trace, onWhole }: { run: string; page: CallPage; trace: string | undefined; onWhole: () => void }): JSX.Element {
  const [overlay, setOverlay] = useParam("overlay", "logprob") as [Overlay, (name: Overlay) => void];
  const [view, setView] = useParam("view", page.choices.some((choice) => choice.tokens.length) ? "tokens" : "messages");
  const up = trace ? href("run", run, "trace", trace, page.span_id) : href("run", run, "rollout", page.rollout_id ?? "", page.attempt_id ?? "", page.span_id);
  const near = (by: number): void => {
    const next = page.turns[page.turn + by];
    if (next) go(callAddress(run, page, trace, next));
  };
  useKeys({ n: () => near(1), j: () => near(1), p: () => near(-1), k: () => near(-1), u: () => go(up) });
  const mates = (page.row?.calls ?? []).filter((each) => each !== page.span_id);
  return (
    <>
      <div class="head">
        <p class="crumbs">
          <a href={up}>rollout</a>
        </p>
        <h1>
          <Agent name={page.agent} /> call {page.turn}
        </h1>
        <span class="picker">
          <button type="button" aria-label="previous call" disabled={page.turn === 0} onClick={() => near(-1)}>
            ‹
          </button>
          {page.turn + 1} of {page.turns.length}
          <button type="button" aria-label="next call" disabled={page.turn === page.turns.length - 1} onClick={() => near(1)}>
            ›
          </button>
        </span>
        <MarkButton run={run} place={placeOf(page, trace, page.span_id)} />
      </div>
      {page.error && <p class="note bad">{page.error}</p>}
      <p class="facts">
        <span>
          model <b>{page.model ?? "not said"}</b>
        </span>
        <span>
          weights <b>{page.version ?? "not recorded"}</b>
        </span>
        <span>
          took <b>{duration(page.ms)}</b>
        </span>
        {page.choices.map((choice) => (
          <span key={choice.index}>
            {page.choices.length > 1 ? `choice ${choice.index}: ` : ""}credit <b>{number(choice.credit)}</b> advantage <Signed value={choice.advantage} /> {choice.finish && <Chip>{choice.finish}</Chip>}
            {choice.left_out && <Chip kind="quiet">not compared: {choice.left_out}</Chip>}
          </span>
        ))}
        <Rewards rewards={page.rewards} />
      </p>
      {page.row && (
        <p class="facts">
          <span>
            its training row has <b>{number(page.row.tokens)}</b> tokens, of which <b>{number(page.row.trained)}</b> are trained
          </span>
          <span>
            {mates.length === 0
              ? "no other call shares it"
              : "shared with "}
            {mates.map((each) => (
              <a key={each} href={callAddress(run, page, trace, each)}>
                call {page.turns.indexOf(each)}
              </a>
            ))}
          </span>
        </p>
      )}
      <div class="bar" role="group" aria-label="view">
        <Toggle on={view === "tokens"} onClick={() => setView("tokens")}>
          tokens
        </Toggle>
        <Toggle on={view === "messages"} onClick={() => setView("messages")}>
          messages
        </Toggle>
        <Toggle on={view === "request"} onClick={() => setView("request")}>
          raw request
        </Toggle>
        <span class="grow" />
        {view === "tokens" && (
          <>
            overlay
            {OVERLAYS.map(([name, title, what]) => (
              <Toggle key={name} on={overlay === name} onClick={() => setOverlay(name)} title={what}>
                {title}
              </Toggle>
            ))}
          </>
        )}
      </div>
      {view === "tokens" && <Tokens page={page} overlay={overlay} onWhole={onWhole} run={run} />}
      {view === "messages" && (
        <section class="card">
          {page.messages.map((said, at) => (
            <Message key={at} said={said} />
          ))}
          {page.choices.map((choice) => (
            <div key={choice.index} class="answer">
              <Message said={choice.message} />
            </div>
          ))}
        </section>
      )}
      {view === "request" && (
        <section class="card">
          <pre class="raw">{pretty(page.request)}</pre>
        </section>
      )}
      <div class="two">
        <details class="card" open>
          <summary>Sampling</summary>
          <Table of={page.sampling} />
        </details>
        <details class="card">
          <summary>Attributes of the span</summary>
          <Table of={page.attributes} />
        </details>
      </div>
    </>
  );
}

const pretty = (text: string): string => {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
};

const Table = ({ of }: { of: Record<string, unknown> }): JSX.Element => (
  <table class="pairs">
    <tbody>
      {Object.entries(of).map(([name, value]) => (
        <tr key={name}>
          <th scope="row">{name}</th>
          <td>
            <code>{typeof value === "string" ? value.slice(0, 2000) : JSON.stringify(value)}</code>
          </td>
        </tr>
      ))}
      {Object.keys(of).length === 0 && (
        <tr>
          <td>nothing was recorded</td>
        </tr>
      )}
    </tbody>
  </table>
);

function Tokens({ page, overlay, onWhole, run }: { page: CallPage; overlay: Overlay; onWhole: () => void; run: string }): JSX.Element {
  const logprobs = useMemo(() => page.choices.flatMap((choice) => choice.tokens.flatMap((token) => (typeof token.logprob === "number" ? [token.logprob] : []))), [page]);
  const most = Math.max(1e-9, extent(page.choices.flatMap((choice) => choice.tokens.map((token) => Math.abs(token.advantage ?? 0))))[1]);
  const seen = page.choices.flatMap((choice) => choice.tokens);
  const entropies = seen.flatMap((token) => (typeof token.entropy === "number" ? [token.entropy] : []));
  const gaps = seen.flatMap((token) => (typeof token.gap === "number" ? [token.gap] : []));
  const widest = Math.max(1e-9, extent([...page.prompt, ...seen].map((token) => Math.abs(token.gap ?? 0)))[1]);
  const scale = overlay === "gap" ? widest : most;
  const total = logprobs.reduce((sum, each) => sum + each, 0);
  if (!page.prompt_total && page.choices.every((choice) => choice.tokens.length === 0))
    return <p class="note">No tokens were recorded of this call, so it can’t be trained on. The messages are what is known.</p>;
  return (
    <section class="card">
      <p class="dim">
        {count(page.prompt_total, "token")} in the prompt, {count(logprobs.length || page.choices.reduce((n, c) => n + c.tokens.length, 0), "token")} sampled
        {logprobs.length > 0 && (
          <>
            , mean log-probability {number(total / logprobs.length)}, perplexity {number(Math.exp(-total / logprobs.length), 2)}
          </>
        )}
        {entropies.length > 0 && `, mean entropy ${number(mean(entropies))} nats`}
        {gaps.length > 0 && `, mean gap ${number(mean(gaps.map(Math.abs)), 4)} nats`}
        {!page.texts && ". The model’s tokenizer.json was not found: ids are shown. Name its folder with --tokenizer"}.
      </p>
      <WhyNot page={page} overlay={overlay} run={run} logprobs={logprobs.length > 0} />
      <Scale overlay={overlay} most={scale} />
      <div class="tokens prompt" aria-label="prompt" tabIndex={0} ref={toEnd}>
        {page.prompt.length < page.prompt_total && (
          <button type="button" class="link" onClick={onWhole}>
            {number(page.prompt_total - page.prompt.length)} tokens before …
          </button>
        )}
        <Run tokens={page.prompt} overlay={overlay} most={scale} sampled={false} texts={page.texts} />
      </div>
      {page.choices.map((choice) => (
        <div key={choice.index} class="tokens response" aria-label={`answer ${choice.index}`}>
          <Run tokens={choice.tokens} overlay={overlay} most={scale} sampled texts={page.texts} />
        </div>
      ))}
    </section>
  );
}

const mean = (values: number[]): number => values.reduce((sum, each) => sum + each, 0) / values.length;

/** Say why an overlay has nothing to show. */
function WhyNot({ page, overlay, run, logprobs }: { page: CallPage; overlay: Overlay; run: string; logprobs: boolean }): JSX.Element | null {
  if (overlay === "none" || (overlay === "logprob" && logprobs)) return null;
  if (overlay === "logprob") return <p class="note">No log-probabilities were recorded: whoever answered sent none.</p>;
  if (page.untrained) return <p class="note">This call is not trained on: {page.untrained}.</p>;
  if (page.unread && (overlay === "entropy" || overlay === "gap"))
    return (
      <p class="note">
        Not known of single tokens: {page.unread}. <a href={href("run", run)}>The run</a> has the means of its steps.
      </p>
    );
  return null;
}

function Scale({ overlay, most }: { overlay: Overlay; most: number }): JSX.Element | null {
  if (overlay === "logprob")
    return (
      <p class="scale">
        likely {[0, 1, 2, 3, 4, 5].map((each) => <i key={each} class={`lp-${each}`} />)} unlikely; steps at probability 0.9, 0.6, 0.37, 0.14 and 0.02
      </p>
    );
  if (overlay === "entropy")
    return (
      <p class="scale">
        certain {[0, 1, 2, 3, 4, 5].map((each) => <i key={each} class={`lp-${each}`} />)} uncertain; steps at 0.1, 0.5, 1, 2 and 4 nats
      </p>
    );
  if (overlay === "advantage" || overlay === "gap")
    return (
      <p class="scale">
        −{number(most)} {[0, 2, 4, 6, 8].map((each) => <i key={each} class={`shade-${each}`} />)} +{number(most)}
        {overlay === "gap" && " nats: right, the trainer holds the token likelier than the engine did"}
      </p>
    );
  if (overlay === "mask")
    return (
      <p class="scale">
        <i class="trained" /> trained <i class="untrained" /> context, or steered by a grammar
      </p>
    );
  return null;
}

function Run({ tokens, overlay, most, sampled, texts }: { tokens: Token[]; overlay: Overlay; most: number; sampled: boolean; texts: boolean }): JSX.Element {
  return (
    <>
      {tokens.map((token, at) => (
        <span key={at} class={`token ${look(token, overlay, most, sampled)} ${texts ? "" : "id"}`} title={about(token, sampled)}>
          {token.text.replace(/\n/g, "⏎\n")}
        </span>
      ))}
    </>
  );
}

/** Show the end of a long prompt: what the answer follows. */
const toEnd = (holder: HTMLElement | null): void => {
  if (holder) holder.scrollTop = holder.scrollHeight;
};

const STOPS = [0.1, 0.5, 1, 2, 4]; // nats: probabilities 0.9, 0.6, 0.37, 0.14, 0.02

function look(token: Token, overlay: Overlay, most: number, sampled: boolean): string {
  if (overlay === "mask") return token.trained ? "trained" : sampled ? "untrained" : "";
  if (overlay === "advantage") return typeof token.advantage === "number" ? `shade-${Math.round((token.advantage / most + 1) * 4)}` : "";
  if (overlay === "gap") return typeof token.gap === "number" ? `shade-${Math.round((token.gap / most + 1) * 4)}` : "";
  if (overlay === "entropy" && typeof token.entropy === "number") return `lp-${STOPS.filter((stop) => (token.entropy ?? 0) >= stop).length}`;
  if (overlay === "logprob" && typeof token.logprob === "number") return `lp-${STOPS.filter((stop) => -(token.logprob ?? 0) >= stop).length}`;
  return "";
}

function about(token: Token, sampled: boolean): string {
  const said = [`token ${token.id}`];
  if (typeof token.logprob === "number") said.push(`log-probability ${token.logprob.toFixed(4)}`, `probability ${(Math.exp(token.logprob) * 100).toFixed(2)} %`);
  if (token.trained !== null && token.trained !== undefined) said.push(token.trained ? "trained" : sampled ? "not trained" : "context");
  if (typeof token.advantage === "number") said.push(`advantage ${token.advantage.toFixed(4)}`);
  if (typeof token.entropy === "number") said.push(`entropy ${token.entropy.toFixed(3)} nats`);
  if (typeof token.gap === "number") said.push(`trainer less engine ${token.gap.toFixed(4)} nats`);
  return said.join("\n");
}
