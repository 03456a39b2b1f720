/**
 * Draws progress on a terminal: one line a task, redrawn at most ten times a second, gone when the command ends.
 * Anywhere else (a pipe, a log) progress is silent: results and errors speak for themselves.
 */
import { humanSize, type Progress, type ProgressEvent, silent } from '#base';

const REDRAW_MS = 100;
/** More tasks than this are summed up in the last line. */
const MAX_LINES = 8;

export interface ProgressLines {
  readonly progress: Progress;
  /** Takes away what is drawn, before something else is printed; the next event draws it again. */
  clear(): void;
  /** Removes what was drawn, for good. Safe to call twice. */
  end(): void;
}

export function progressOn(stream: NodeJS.WriteStream): ProgressLines {
  if (!stream.isTTY || process.env.TERM === 'dumb') return { progress: silent, clear: () => {}, end: () => {} };
  const tasks = new Map<string, ProgressEvent>();
  let drawnLines = 0;
  let timer: NodeJS.Timeout | undefined;
  let ended = false;

  const draw = () => {
    timer = undefined;
    if (ended) return;
    const lines = progressText([...tasks.values()], stream.columns || 80);
    stream.write(`${erase(drawnLines)}${lines.map((line) => `${line}\n`).join('')}`);
    drawnLines = lines.length;
  };
  const clear = () => {
    if (drawnLines > 0) stream.write(erase(drawnLines));
    drawnLines = 0;
  };
  return {
    progress(event) {
      if (ended) return;
      if (event.phase === 'done' || event.phase === 'exists') tasks.delete(event.task);
      else tasks.set(event.task, event);
      timer ??= setTimeout(draw, REDRAW_MS).unref();
    },
    clear,
    end() {
      if (ended) return;
      clear();
      ended = true;
      clearTimeout(timer);
    },
  };
}

function erase(lines: number): string {
  return lines === 0 ? '' : `\u001b[${lines}A\u001b[J`;
}

/** The lines to draw, none wider than `columns`. */
export function progressText(events: readonly ProgressEvent[], columns: number): string[] {
  const shownEvents = events.slice(0, events.length > MAX_LINES ? MAX_LINES - 1 : MAX_LINES);
  const lines = shownEvents.map((event) => {
    const amount = amountText(event);
    return `${event.task}  ${event.phase}${amount === '' ? '' : `  ${amount}`}${event.note === undefined ? '' : `  ${event.note}`}`;
  });
  if (shownEvents.length < events.length) lines.push(`and ${events.length - shownEvents.length} more`);
  return lines.map((line) => line.slice(0, Math.max(1, columns - 1)));
}

function amountText({ doneBytes, totalBytes }: ProgressEvent): string {
  if (doneBytes === undefined) return '';
  if (totalBytes === undefined || totalBytes === 0) return humanSize(doneBytes);
  const percent = Math.min(100, Math.floor((100 * doneBytes) / totalBytes));
  return `${String(percent).padStart(3)}%  ${humanSize(doneBytes)} of ${humanSize(totalBytes)}`;
}
