/** libdsec in TypeScript against a real service: control/sdk/scenarios.json, which the Python library runs too. */
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, beforeEach, describe, expect, it } from 'vitest';
import { CommandFailed, DSecClient, DSecError, SandboxGone, UnsupportedError } from '../sdk/typescript/src/index.ts';
import { pattern, type Site, STEPS, sha256, TREE_TEXT } from './sdk/scenario-steps.ts';
import { canRun, IMAGE, makeWorld, root, type World } from './sdk/world.ts';

interface ScenarioStep {
  readonly do: string;
  readonly with?: Readonly<Record<string, unknown>>;
  readonly gives?: Readonly<Record<string, unknown>>;
  readonly raises?: Readonly<Record<string, unknown>>;
}

const scenarios = JSON.parse(fs.readFileSync(join(root, 'control/sdk/scenarios.json'), 'utf8')) as {
  readonly name: string;
  readonly steps: readonly ScenarioStep[];
}[];

describe.skipIf(!canRun)('libdsec, TypeScript', { timeout: 180_000 }, () => {
  let world: World;
  let site: Site;
  let client: DSecClient;

  beforeAll(async () => {
    world = await makeWorld();
    client = await new DSecClient({ url: world.url, token: world.token }).open();
  }, 400_000);
  afterAll(async () => {
    client?.close();
    await world?.close();
  }, 400_000);
  beforeEach(async () => {
    world.front.faults.length = 0;
    const folder = fs.mkdtempSync(join(world.folder, 'scenario-'));
    const sandbox = await client.runContainer({ containerImage: IMAGE });
    site = { client, url: world.url, image: IMAGE, folder, sandbox };
    return async () => {
      world.front.faults.length = 0;
      await sandbox.remove({ force: true });
      await site.sandbox.remove({ force: true });
    };
  });

  for (const { name, steps } of scenarios) {
    it(name, async () => {
      for (const [at, step] of steps.entries()) {
        const label = `step ${at + 1}: ${step.do} ${JSON.stringify(step.with ?? {})}`;
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
    });
  }
});

function errorView(error: DSecError): Record<string, unknown> {
  const { code, retryable, message, requestId, status } = error;
  const view = { class: error.constructor.name, code, retryable, message, request_id: requestId, status };
  if (error instanceof SandboxGone) return { ...view, reason: error.reason };
  if (error instanceof UnsupportedError) return { ...view, backend: error.backend };
  if (!(error instanceof CommandFailed)) return view;
  const { exitCode, stdout, timedOut } = error.result;
  return { ...view, exit_code: exitCode, stdout, timed_out: timedOut };
}

function check(given: unknown, wanted: Readonly<Record<string, unknown>>, label: string): void {
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
