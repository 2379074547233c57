// Commands for a terminal, to copy.
import type { ComponentChildren, JSX } from "preact";
import { useState } from "preact/hooks";

/** A word of a command as a shell reads it. */
export const quoted = (text: string): string => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

export function Commands({ title, lines, children }: { title: string; lines: string[]; children: ComponentChildren }): JSX.Element | null {
  const [copied, setCopied] = useState(false);
  if (lines.length === 0) return null;
  const copy = (): void => {
    navigator.clipboard
      ?.writeText(lines.join("\n"))
      .then(() => setCopied(true))
      .catch(() => setCopied(false));
  };
  return (
    <details class="card" open>
      <summary>{title}</summary>
      <p class="dim">{children}</p>
      <pre class="raw commands">{lines.join("\n")}</pre>
      <button type="button" onClick={copy}>
        {copied ? "copied" : "copy"}
      </button>
    </details>
  );
}
