/** What a step of a scenario gives or raises, held against what the scenario says. Python has the same in control/sdk/python/tests/test_scenarios.py. */
import { expect } from 'vitest';
import { CommandFailed, DSecError, SandboxGone, UnsupportedError } from '../../sdk/typescript/src/index.ts';
import { pattern, type Site, STEPS, sha256, TREE_TEXT } from './scenario-steps.ts';

export interface ScenarioStep {
  readonly do: string;
  readonly with?: Readonly<Record<string, unknown>>;
  readonly gives?: Readonly<Record<string, unknown>>;
  readonly raises?: Readonly<Record<string, unknown>>;
}

export async function takeStep(site: Site, step: ScenarioStep, label: string): Promise<void> {
  let given: unknown;
  let thrown: unknown;
  try {
    given = await STEPS[step.do]!(site, step.with ?? {});
  } catch (error) {
    thrown = error;
  }
  if (step.raises !== undefined) {
    expect(thrown, label).toBeInstanceOf(DSecError);
    check(errorView(thrown as DSecError), step.raises, label);
  } else {
    if (thrown !== undefined) throw new Error(`${label}: ${(thrown as Error).message}`, { cause: thrown });
    check(given, step.gives ?? {}, label);
  }
}

export function errorView(error: DSecError): Record<string, unknown> {
  const { code, retryable, message, requestId, status } = error;
  const view = { class: error.constructor.name, code, retryable, message, request_id: requestId, status };
  if (error instanceof SandboxGone) return { ...view, reason: error.reason };
  if (error instanceof UnsupportedError) return { ...view, backend: error.backend };
  if (!(error instanceof CommandFailed)) return view;
  const { exitCode, stdout, timedOut } = error.result;
  return { ...view, exit_code: exitCode, stdout, timed_out: timedOut };
}

export function check(given: unknown, wanted: Readonly<Record<string, unknown>>, label: string): void {
  for (const [key, value] of Object.entries(wanted)) {
    const actual = (given as Record<string, unknown> | undefined)?.[key];
    if (typeof value === 'string' && value.startsWith('re:'))
      expect(String(actual), label).toMatch(new RegExp(value.slice(3)));
    else expect(actual, `${label}: ${key}`).toEqual(meant(value));
  }
}

function meant(value: unknown): unknown {
  if (value === '$tree') return TREE_TEXT;
  const [kind, count] = typeof value === 'string' ? value.split(':') : [];
  if (kind === '$pattern') return sha256(pattern(Number(count)));
  if (kind === '$zs') return sha256(Buffer.alloc(Number(count), 'z'));
  return value;
}
