// Charts: lines by uPlot, with a legend of our own (uPlot's writes names as markup); bars and points as SVG.
import type { JSX } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { extent, hues, number, shade } from "./ui";

export interface Line {
  name: string;
  points: [number, number][];
  dashed?: boolean;
  strong?: boolean;
  band?: Map<number, [number, number]>;
  tone?: string;
}

const tone = (name: string): string => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Something that happened between two steps: a vertical line with its text below the chart. */
export interface Mark {
  at: number;
  text: string;
}

interface Chart {
  title: string;
  lines: Line[];
  onStep?: (step: number) => void;
  unit?: string;
  marks?: Mark[];
}

function drawMarks(chart: uPlot, marks: Mark[], colour: string): void {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.strokeStyle = colour;
  ctx.setLineDash([3, 3]);
  for (const { at } of marks) {
    const x = Math.round(chart.valToPos(at, "x", true));
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

export function Lines({ title, lines, onStep, unit = "", marks = [] }: Chart): JSX.Element | null {
  const holder = useRef<HTMLDivElement>(null);
  const known = JSON.stringify([marks, lines.map((line) => [line.name, line.points, line.band ? [...line.band] : 0])]);
  const plain = hues(lines.filter((line) => !line.tone).map((line) => line.name));
  const tones = lines.map((line) => line.tone ?? plain.shift() ?? "ink");
  const xs = useMemo(() => [...new Set(lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b), [known]);
  useEffect(() => {
    const place = holder.current;
    if (!place || xs.length === 0) return;
    const draw = (): uPlot => {
      const colours = tones.map((each) => tone(`--${each}`) || tone("--ink"));
      const series: uPlot.Series[] = [{}];
      const bands: uPlot.Band[] = [];
      const data: (number | null)[][] = [xs];
      lines.forEach((line, at) => {
        const values = new Map(line.points);
        const colour = colours[at] ?? "";
        series.push({
          stroke: colour,
          width: line.strong ? 2.25 : 1.25,
          points: { show: line.points.length < 60, size: line.strong ? 5 : 4, fill: colour },
          spanGaps: true,
          ...(line.dashed ? { dash: [4, 4] } : {}),
        });
        data.push(xs.map((x) => values.get(x) ?? null));
        if (line.band && line.band.size > 1) {
          const low = series.length;
          for (const end of [0, 1] as const) {
            series.push({ stroke: "transparent", points: { show: false }, spanGaps: true });
            data.push(xs.map((x) => line.band?.get(x)?.[end] ?? null));
          }
          bands.push({ series: [low + 1, low], fill: `${colour}${lines.length > 2 ? "18" : "28"}` });
        }
      });
      const axis = { stroke: tone("--dim"), grid: { stroke: tone("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
      const chart = new uPlot(
        {
          width: Math.max(200, place.clientWidth),
          height: 150,
          legend: { show: false },
          cursor: { y: false, drag: { x: false, y: false } },
          scales: { x: { time: false }, y: { range: (_, low, high) => (low === high ? [Math.min(0, low * 1.5), Math.max(0, high * 1.5) || 1] : [low - (high - low) * 0.05, high + (high - low) * 0.05]) } },
          axes: [
            { ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000], size: 26 },
            { ...axis, size: 46, values: (_, all) => all.map((each) => number(each)) },
          ],
          series,
          bands,
          hooks: { draw: [(drawn) => drawMarks(drawn, marks, tone("--bad"))] },
        },
        data as uPlot.AlignedData,
        place,
      );
      if (onStep) {
        chart.over.addEventListener("click", () => {
          const at = chart.cursor.idx;
          if (at !== null && at !== undefined && xs[at] !== undefined) onStep(xs[at]);
        });
        chart.over.classList.add("clickable");
      }
      return chart;
    };
    let chart = draw();
    const again = (): void => {
      chart.destroy();
      chart = draw();
    };
    const watcher = new ResizeObserver(() => chart.setSize({ width: Math.max(200, place.clientWidth), height: 150 }));
    watcher.observe(place);
    addEventListener("theme", again);
    return () => {
      watcher.disconnect();
      removeEventListener("theme", again);
      chart.destroy();
    };
  }, [known]);
  if (xs.length === 0) return null;
  return (
    <figure class="card chart">
      <figcaption>{title}</figcaption>
      <div ref={holder} role="img" aria-label={`${title}: ${lines.map((line) => `${line.name} ${number(line.points.at(-1)?.[1])}`).join(", ")}`} />
      <div class="legend">
        {lines.map((line, at) => (
          <span key={line.name}>
            <i class={`${tones[at]} ${line.dashed ? "dashed" : ""}`} aria-hidden="true" />
            {line.name} <b>{number(line.points.at(-1)?.[1])}</b>
            {unit}
          </span>
        ))}
        {marks.map((mark) => (
          <span key={`${mark.at}${mark.text}`}>
            <i class="bad-line dashed" aria-hidden="true" />
            {mark.text}
          </span>
        ))}
      </div>
    </figure>
  );
}

export function Spark({ points }: { points: number[] }): JSX.Element | null {
  if (points.length < 2) return null;
  const low = Math.min(...points);
  const span = Math.max(...points) - low || 1;
  const path = points.map((value, at) => `${((at / (points.length - 1)) * 96 + 2).toFixed(1)},${(22 - ((value - low) / span) * 20).toFixed(1)}`).join(" ");
  return (
    <svg class="spark" viewBox="0 0 100 24" aria-hidden="true">
      <polyline points={path} />
    </svg>
  );
}

export interface Bin {
  low: number;
  high: number;
  values: number;
}

export function binsOf(values: number[], most = 24): Bin[] {
  if (values.length === 0) return [];
  const distinct = [...new Set(values)].sort((a, b) => a - b);
  if (distinct.length <= most) return distinct.map((value) => ({ low: value, high: value, values: values.filter((v) => v === value).length }));
  const low = distinct[0] ?? 0;
  const width = ((distinct.at(-1) ?? 0) - low) / most;
  return Array.from({ length: most }, (_, at) => {
    const from = low + at * width;
    const to = at === most - 1 ? (distinct.at(-1) ?? 0) : from + width;
    return { low: from, high: to, values: values.filter((v) => v >= from && (at === most - 1 ? v <= to : v < to)).length };
  });
}

export const inBin = (value: number, bin: Bin, last: boolean): boolean =>
  bin.low === bin.high ? value === bin.low : value >= bin.low && (last ? value <= bin.high : value < bin.high);

export function Histogram({ bins, chosen, onChoose, label }: { bins: Bin[]; chosen: number | null; onChoose: (at: number | null) => void; label: string }): JSX.Element {
  const most = Math.max(1, ...bins.map((bin) => bin.values));
  return (
    <div class="histogram" role="group" aria-label={label}>
      {bins.map((bin, at) => {
        const name = bin.low === bin.high ? number(bin.low) : `${number(bin.low)} – ${number(bin.high)}`;
        return (
          <button type="button" key={at} aria-pressed={chosen === at} title={`${bin.values} rollouts with reward ${name}`} onClick={() => onChoose(chosen === at ? null : at)}>
            <b>{bin.values}</b>
            <i class={shade((bin.low + bin.high) / 2)} style={{ height: `${Math.max(2, (bin.values / most) * 72)}px` }} />
            <small>{name}</small>
          </button>
        );
      })}
    </div>
  );
}

export interface Point {
  x: number;
  y: number;
  label: string;
  address: string;
}

export function Scatter({ points, x, y }: { points: Point[]; x: string; y: string }): JSX.Element {
  const [width, height, left, bottom] = [560, 320, 48, 36];
  const range = (values: number[]): [number, number] => {
    const [low, high] = extent(values);
    const pad = (high - low || 1) * 0.06;
    return [low - pad, high + pad];
  };
  const [x0, x1] = range(points.map((point) => point.x));
  const [y0, y1] = range(points.map((point) => point.y));
  const px = (value: number): number => left + ((value - x0) / (x1 - x0)) * (width - left - 8);
  const py = (value: number): number => height - bottom - ((value - y0) / (y1 - y0)) * (height - bottom - 8);
  // Points that lie on each other are spread a little, always in the same way.
  const spread = (at: number, by: number): number => Math.sin(at * 12.9898 + by) * 4;
  const ticks = (low: number, high: number): number[] => [0.1, 0.5, 0.9].map((part) => low + part * (high - low));
  return (
    <svg class="scatter" viewBox={`0 0 ${width} ${height}`} role="group" aria-label={`${y} against ${x}, ${points.length} attempts`}>
      <line x1={left} y1={height - bottom} x2={width} y2={height - bottom} />
      <line x1={left} y1={0} x2={left} y2={height - bottom} />
      {ticks(x0, x1).map((each) => (
        <text x={px(each)} y={height - bottom + 14} text-anchor="middle">
          {number(each, 2)}
        </text>
      ))}
      {ticks(y0, y1).map((each) => (
        <text x={left - 6} y={py(each) + 4} text-anchor="end">
          {number(each, 2)}
        </text>
      ))}
      <text x={(width + left) / 2} y={height - 4} text-anchor="middle" class="name">
        {x}
      </text>
      <text x={12} y={(height - bottom) / 2} text-anchor="middle" class="name" transform={`rotate(-90 12 ${(height - bottom) / 2})`}>
        {y}
      </text>
      {points.map((point, at) => (
        <a key={at} href={point.address} aria-label={point.label}>
          <circle cx={px(point.x) + spread(at, 1)} cy={py(point.y) + spread(at, 2)} r="5">
            <title>{point.label}</title>
          </circle>
        </a>
      ))}
    </svg>
  );
}
