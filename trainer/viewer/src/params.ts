// What a screen is set to (filters, bins, order) is part of the address: a link shows others the same.
import { useEffect, useState } from "preact/hooks";

export const query = (): string => {
  const at = location.hash.indexOf("?");
  return at < 0 ? "" : location.hash.slice(at);
};

const written = (name: string): string | null => new URLSearchParams(query()).get(name);

function write(name: string, value: string, fallback: string): void {
  const all = new URLSearchParams(query());
  if (value === fallback) all.delete(name);
  else all.set(name, value);
  const text = String(all);
  history.replaceState(null, "", `${location.hash.replace(/\?.*$/, "") || "#/"}${text ? `?${text}` : ""}`);
  dispatchEvent(new Event("params"));
}

/** A setting of the screen by its name in the address; one at its fallback is left out there. */
export function useParam(name: string, fallback = ""): [string, (value: string) => void] {
  const [value, setValue] = useState(written(name) ?? fallback);
  useEffect(() => {
    const read = (): void => setValue(written(name) ?? fallback);
    read();
    addEventListener("params", read);
    addEventListener("hashchange", read);
    return () => {
      removeEventListener("params", read);
      removeEventListener("hashchange", read);
    };
  }, [name, fallback]);
  return [value, (wanted) => write(name, wanted, fallback)];
}

/** The same for a setting that is on or off. */
export function useFlag(name: string, fallback = false): [boolean, (on: boolean) => void] {
  const [value, setValue] = useParam(name, fallback ? "1" : "");
  return [value === "1", (on) => setValue(on ? "1" : fallback ? "0" : "")];
}
