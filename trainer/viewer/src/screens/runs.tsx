// All runs in a list, and two to four of them compared.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useGet, type RunPage, type RunRow } from "../api";
import { Lines, Spark, type Line } from "../charts";
import { go, href, number, Show } from "../ui";

const when = (seconds: number | null): string => (seconds === null ? "–" : new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }));

export function Runs(): JSX.Element {
  const runs = useGet<RunRow[]>("runs", {});
  const [chosen, setChosen] = useState<string[]>([]);
  const flip = (name: string): void => setChosen(chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name].slice(-4));
  return (
    <Show of={runs}>
      {(data) => {
        const only = data[0];
        if (data.length === 1 && only) queueMicrotask(() => location.replace(href("run", only.name)));
        return (
          <>
            <h1>Runs</h1>
            <p class="bar">
              <button type="button" disabled={chosen.length < 2} onClick={() => go(href("compare", chosen.join("|")))}>
                Compare {chosen.length > 1 ? chosen.length : "two to four"}
              </button>
            </p>
            <div class="scroll">
              <table class="rows">
                <thead>
                  <tr>
                    <th aria-label="compare" />
                    <th>run</th>
                    <th>reward</th>
                    <th class="num">first</th>
                    <th class="num">last</th>
                    <th class="num">held out, first</th>
                    <th class="num">last</th>
                    <th class="num">steps</th>
                    <th>agents</th>
                    <th>model</th>
                    <th>last written</th>
                    <th class="num">alarms</th>
                  </tr>
                </thead>
                <tbody>
                  {data.map((run) => (
                    <tr key={run.name}>
                      <td>
                        <input type="checkbox" aria-label={`compare ${run.name}`} checked={chosen.includes(run.name)} onChange={() => flip(run.name)} />
                      </td>
                      <td>
                        <a href={href("run", run.name)}>{run.name}</a>
                      </td>
                      <td>
                        <Spark points={run.curve} />
                      </td>
                      <td class="num">{number(run.reward_first)}</td>
                      <td class="num">{number(run.reward_last)}</td>
                      <td class="num">{number(run.val_first)}</td>
                      <td class="num">{number(run.val_last)}</td>
                      <td class="num">{run.steps}</td>
                      <td>{run.agents?.join(", ") ?? "all"}</td>
                      <td>{run.model ?? "–"}</td>
                      <td>{when(run.updated_s)}</td>
                      <td class={`num ${run.alarms ? "bad" : ""}`}>{run.alarms}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          </>
        );
      }}
    </Show>
  );
}

const HUES = ["hue-0", "hue-1", "hue-4", "hue-5"];

export function Compare({ names }: { names: string[] }): JSX.Element {
  const [a, b, c, d] = [0, 1, 2, 3].map((at) => useGet<RunPage>(names[at] ? "run" : null, { run: names[at] ?? "" }));
  const pages = [a, b, c, d].slice(0, names.length).map((each) => each?.data ?? null);
  const series = (name: string, kind: "train" | "val"): Line[] =>
    pages.flatMap((page, at) =>
      page
        ? [{ name: names[at] ?? "", tone: HUES[at] ?? "hue-0", points: page[kind].filter((l) => typeof l[name] === "number").map((l) => [Number(l.step), Number(l[name])] as [number, number]) }]
        : [],
    ).filter((line) => line.points.length > 0);
  const keys = [...new Set(pages.flatMap((page) => Object.keys(page?.options ?? {})))].filter(
    (key) => new Set(pages.map((page) => JSON.stringify(page?.options[key] ?? null))).size > 1,
  );
  return (
    <>
      <h1>{names.join(" · ")}</h1>
      <div class="charts">
        <Lines title="Reward" lines={series("reward", "train")} />
        <Lines title="Held out" lines={series("reward", "val")} />
        <Lines title="Entropy, nats a token" lines={series("entropy", "train")} />
        <Lines title="Seconds a step" lines={series("seconds", "train")} />
      </div>
      <h2>What differs in their options</h2>
      <div class="scroll">
        <table class="rows">
          <thead>
            <tr>
              <th>option</th>
              {names.map((name) => (
                <th key={name}>{name}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {keys.map((key) => (
              <tr key={key}>
                <td>{key}</td>
                {pages.map((page, at) => (
                  <td key={at}>
                    <code>{JSON.stringify(page?.options[key] ?? null)}</code>
                  </td>
                ))}
              </tr>
            ))}
            {keys.length === 0 && (
              <tr>
                <td colSpan={names.length + 1}>nothing</td>
              </tr>
            )}
          </tbody>
        </table>
      </div>
    </>
  );
}
