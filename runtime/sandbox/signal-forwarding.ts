/**
 * Signals that `dsec run` gets are the sandbox's: each is passed on to its first process.
 *
 * One that the command has no handler for ends it, as outside a sandbox: see backend/signal-effect.ts. What the command ignores
 * or handles without ending is up to it; three interrupts or terminations within three seconds end the sandbox with SIGKILL.
 */
import type { RunningSandbox } from '../backend/backend.ts';

/** The command line turns these four over with `takeSignals`; it has handlers of its own for them. */
const ENDING: readonly NodeJS.Signals[] = ['SIGINT', 'SIGTERM', 'SIGHUP', 'SIGQUIT'];
const OTHERS: readonly NodeJS.Signals[] = ['SIGALRM', 'SIGCONT', 'SIGUSR1', 'SIGUSR2', 'SIGWINCH'];

const IMPATIENT_TIMES = 3;
const IMPATIENT_WITHIN_MS = 3000;

export type TakeSignals = (handler: (signal: NodeJS.Signals) => void) => void;

export interface SignalForwarding {
  /** From now on; what came before is passed on at once. */
  to(sandbox: RunningSandbox): void;
  stop(): void;
}

/** @param all `takeSignals` hands over every signal: no handler of this process is needed. */
export function forwardSignals(
  takeSignals?: TakeSignals,
  all = false,
  nowMs: () => number = () => performance.now(),
): SignalForwarding {
  let target: RunningSandbox | undefined;
  let stopped = false;
  const early: NodeJS.Signals[] = [];
  const pressed: number[] = [];
  const handler = (signal: NodeJS.Signals) => {
    if (stopped) return;
    if (target === undefined) {
      early.push(signal);
      return;
    }
    target.kill(signal);
    if (signal !== 'SIGINT' && signal !== 'SIGTERM') return;
    pressed.push(nowMs());
    const recent = pressed.filter((time) => nowMs() - time <= IMPATIENT_WITHIN_MS);
    if (recent.length >= IMPATIENT_TIMES) target.kill('SIGKILL');
  };
  const own = takeSignals === undefined ? [...ENDING, ...OTHERS] : all ? [] : OTHERS;
  for (const signal of own) process.on(signal, handler);
  takeSignals?.(handler);
  return {
    to(sandbox) {
      target = sandbox;
      for (const signal of early.splice(0)) handler(signal);
    },
    stop() {
      stopped = true;
      for (const signal of own) process.removeListener(signal, handler);
    },
  };
}
