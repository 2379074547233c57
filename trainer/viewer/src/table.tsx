// A table whose columns sort by a click; the order is part of the address.
import type { ComponentChildren, JSX } from "preact";
import { useState } from "preact/hooks";
import { useParam } from "./params";
import { number } from "./ui";

type Value = number | string | null | undefined;

export interface Column<T> {
  name: string;
  label?: string;
  title?: string;
  group?: string; // a heading over this column and its neighbours with the same one
  first?: boolean; // the first of its group: set apart from the column before
  text?: boolean; // sorts from A, not from the largest, and is not aligned as a number
  value: (row: T) => Value;
  cell?: (row: T) => ComponentChildren;
}

const SHOWN = 100;

function compare(a: Value, b: Value): number {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

/** Sort rows by a column; those without a value are last in either direction. */
function sorted<T>(rows: T[], column: Column<T> | undefined, down: boolean): T[] {
  if (!column) return rows;
  const known = rows.filter((row) => column.value(row) !== null && column.value(row) !== undefined);
  const rest = rows.filter((row) => !known.includes(row));
  known.sort((a, b) => compare(column.value(a), column.value(b)) * (down ? -1 : 1));
  return [...known, ...rest];
}

/** The headings over the columns, each with the number of columns under it. */
const groupsOf = <T,>(columns: Column<T>[]): [string, number][] =>
  columns.reduce<[string, number][]>((all, { group = "" }) => {
    const last = all.at(-1);
    return last?.[0] === group ? [...all.slice(0, -1), [group, last[1] + 1]] : [...all, [group, 1]];
  }, []);

interface Props<T> {
  columns: Column<T>[];
  rows: T[];
  first: string; // the order without one in the address: a column's name, with "-" in front from the largest
  param?: string;
  label: string;
}

export function SortedTable<T>({ columns, rows, first, param = "sort", label }: Props<T>): JSX.Element {
  const [order, setOrder] = useParam(param, first);
  const [most, setMost] = useState(SHOWN);
  const down = order.startsWith("-");
  const name = order.replace(/^-/, "");
  const press = (column: Column<T>): void => {
    const start = column.text ? column.name : `-${column.name}`;
    setOrder(column.name !== name ? start : down ? column.name : `-${column.name}`);
  };
  const shown = sorted(rows, columns.find((column) => column.name === name), down);
  return (
    <>
      <div class="scroll" role="group" aria-label={label} tabIndex={0}>
        <table class="rows sorts">
          <thead>
            {columns.some((column) => column.group) && (
              <tr>
                {groupsOf(columns).map(([group, span], at) =>
                  group ? (
                    <th key={at} colSpan={span} scope="colgroup" class="first group">
                      {group}
                    </th>
                  ) : (
                    <td key={at} colSpan={span} />
                  ),
                )}
              </tr>
            )}
            <tr>
              {columns.map((column) => (
                <th key={column.name} class={`${column.text ? "" : "num"} ${column.first ? "first" : ""}`} title={column.title} aria-sort={column.name !== name ? undefined : down ? "descending" : "ascending"}>
                  <button type="button" class="link" onClick={() => press(column)}>
                    {column.label ?? column.name}
                    <span aria-hidden="true">{column.name !== name ? "" : down ? " ↓" : " ↑"}</span>
                  </button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.slice(0, most).map((row, at) => (
              <tr key={at}>
                {columns.map((column) => {
                  const value = column.value(row);
                  return (
                    <td key={column.name} class={`${column.text ? "" : "num"} ${column.first ? "first" : ""}`}>
                      {column.cell ? column.cell(row) : typeof value === "number" ? number(value) : (value ?? "–")}
                    </td>
                  );
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {shown.length > most && (
        <button type="button" onClick={() => setMost(most + SHOWN)}>
          Show {number(Math.min(SHOWN, shown.length - most))} more of {number(shown.length)}
        </button>
      )}
    </>
  );
}
