// The frame around every screen: where one is, where one can go, keys, light and dark.
import { render, type JSX } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { takeKey, useChanges, useGet, type ScalePage, type State } from "./api";
import { marksChanged } from "./marks";
import { Account } from "./screens/account";
import { Call } from "./screens/call";
import { Credit } from "./screens/credit";
import { Deployment } from "./screens/deployment";
import { Deployments } from "./screens/deployments";
import { Group } from "./screens/group";
import { Loose } from "./screens/loose";
import { Marks } from "./screens/marks";
import { Rewards } from "./screens/rewards";
import { Rollout } from "./screens/rollout";
import { Overview } from "./screens/run";
import { Compare, Runs } from "./screens/runs";
import { Search } from "./screens/search";
import { Step } from "./screens/step";
import { Fleet, Tools } from "./screens/tools";
import { Tries, Try } from "./screens/tries";
import { go, href, setScale, Toggle, useKeys } from "./ui";
import "./app.css";

const decoded = (part: string): string => {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // somebody typed a lone %
  }
};

const parse = (): string[] => location.hash.replace(/^#\//, "").replace(/\?.*$/, "").split("/").filter(Boolean).map(decoded);

const TABS: [string, string][] = [
  ["", "Overview"],
  ["step", "Groups"],
  ["tries", "Before/after"],
  ["account", "Account"],
  ["credit", "Credit"],
  ["rewards", "Rewards"],
  ["tools", "Calls"],
  ["fleet", "Fleet"],
  ["deployments", "Deployments"],
  ["search", "Search"],
  ["marks", "Marked"],
];

const KEYS: [string, string][] = [
  ["j k", "next and previous span of a rollout"],
  ["n p", "next and previous rollout of the group, call of the rollout, step of the run"],
  ["Enter", "open the call under the mark: its tokens"],
  ["u", "up: call, rollout, group, step, run"],
  ["m", "mark what is shown"],
  ["/", "search"],
  ["t", "light or dark"],
  ["?", "these keys"],
];

const STATES: Record<State, string> = {
  running: "Something is at work on this run. What it writes shows here without a reload.",
  stopped: "Nothing is at work on this run. What is written shows here without a reload.",
  idle: "No attempt is running. New data appears without a reload.",
  "not connected": "The server does not respond. This page shows what was read before.",
};

function App(): JSX.Element {
  const [path, setPath] = useState(parse);
  const [help, setHelp] = useState(false);
  useEffect(() => {
    const moved = (): void => {
      if (takeKey()) return location.reload(); // everything shown was read, or refused, with another key
      setPath(parse());
      scrollTo(0, 0);
    };
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  const [kind, run = "", screen = "", ...rest] = path;
  const shown = kind === "run" ? run : null;
  const { tick, state } = useChanges(shown);
  const scale = useGet<ScalePage>(shown === null ? null : "scale", { run: shown }, tick);
  useMemo(() => scale.data && setScale(scale.data), [scale.data]);
  const ready = shown === null || scale.data !== null || scale.error !== null; // or colours would change
  useEffect(() => void (tick > 0 && marksChanged()), [tick]);
  const [dark, setDark] = useTheme();
  useKeys({
    "?": () => setHelp(!help),
    Escape: () => setHelp(false),
    t: () => setDark(!dark),
    "/": () => shown !== null && go(href("run", run, "search")),
  });
  useEffect(() => {
    document.title = ["Lightning-RL", run, screen, ...rest].filter(Boolean).join(" · ");
  });
  const under = screen === "group" || screen === "rollout" || screen === "call" ? "step" : screen;
  return (
    <>
      <a class="skip" href="#main" onClick={(e) => (e.preventDefault(), document.getElementById("main")?.focus())}>
        to the content
      </a>
      <header class="top">
        <a class="brand" href="#/">
          Lightning-RL
        </a>
        {shown !== null && (
          <>
            <a class="run-name" href={href("run", run)}>
              {run}
            </a>
            {state !== null && (
              <span class={`state ${state.replace(" ", "-")}`} role="status" title={STATES[state]}>
                {state}
              </span>
            )}
            <nav aria-label="Screens of the run">
              {TABS.filter(([name]) => name !== "deployments" || scale.data?.deployed).map(([name, title]) => (
                <a key={name} href={name ? href("run", run, name) : href("run", run)} aria-current={under === name ? "page" : undefined}>
                  {title}
                </a>
              ))}
            </nav>
          </>
        )}
        <span class="grow" />
        <Toggle on={dark} onClick={() => setDark(!dark)} title="t">
          {dark ? "dark" : "light"}
        </Toggle>
        <Toggle on={help} onClick={() => setHelp(!help)} title="?">
          keys
        </Toggle>
      </header>
      {help && (
        <dl class="card help">
          {KEYS.map(([key, what]) => (
            <div key={key}>
              <dt>
                <kbd>{key}</kbd>
              </dt>
              <dd>{what}</dd>
            </div>
          ))}
        </dl>
      )}
      <main id="main" tabIndex={-1}>
        {ready && <Screen kind={kind} run={run} screen={screen} rest={rest} tick={tick} />}
      </main>
    </>
  );
}

// The step that an address names, as `stepHref` writes it; null where it names none.
function stepIn(part: string, mode = "train"): number | null {
  const step = /^\d+$/.test(part) ? Number(part) - (mode === "train" ? 1 : 0) : -1;
  return step < 0 ? null : step;
}

interface Where {
  kind: string | undefined;
  run: string;
  screen: string;
  rest: string[];
  tick: number;
}

function Screen({ kind, run, screen, rest, tick }: Where): JSX.Element {
  const [one = "", two = "", three = ""] = rest;
  if (kind === "compare") return <Compare names={run.split("|")} />;
  if (kind !== "run") return <Runs />;
  switch (screen) {
    case "step":
      return <Step key={`${one}/${two}`} run={run} mode={one || "train"} step={stepIn(two, one || "train")} tick={tick} />;
    case "group":
      return <Group key={one} run={run} group={one} tick={tick} />;
    case "rollout":
      return <Rollout key={`${one}/${two}`} run={run} rollout={one} attempt={two || null} span={three || null} tick={tick} />;
    case "tries":
      return one ? <Try key={`${one}/${two}`} run={run} left={one} right={two} /> : <Tries run={run} tick={tick} />;
    case "trace":
      return <Rollout key={one} run={run} trace={one} span={two || null} />;
    case "call":
      return <Call key={rest.join("/")} run={run} rollout={one} attempt={two || null} span={three} />;
    case "tracecall":
      return <Call key={rest.join("/")} run={run} trace={one} span={two} />;
    case "account":
      return <Account run={run} step={stepIn(one)} tick={tick} />;
    case "credit":
      return <Credit run={run} step={stepIn(one)} tick={tick} />;
    case "rewards":
      return <Rewards run={run} mode={one} step={stepIn(two, one || "train")} tick={tick} />;
    case "tools":
      return <Tools run={run} mode={one} step={stepIn(two, one || "train")} tick={tick} />;
    case "fleet":
      return <Fleet run={run} tick={tick} />;
    case "deployments":
      return one ? <Deployment key={one} run={run} agent={one} tick={tick} /> : <Deployments run={run} tick={tick} />;
    case "search":
      return <Search key={one} run={run} text={one} />;
    case "marks":
      return <Marks run={run} />;
    case "loose":
      return <Loose run={run} />;
    default:
      return <Overview run={run} tick={tick} />;
  }
}

function useTheme(): [boolean, (dark: boolean) => void] {
  const [dark, setDark] = useState(() => {
    const chosen = localStorage.getItem("lightning-rl-theme");
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  });
  useEffect(() => {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    dispatchEvent(new Event("theme"));
  }, [dark]);
  const choose = (wanted: boolean): void => {
    localStorage.setItem("lightning-rl-theme", wanted ? "dark" : "light");
    setDark(wanted);
  };
  return [dark, choose];
}

takeKey();
const place = document.getElementById("app");
if (place) render(<App />, place);
