/** libdsec in TypeScript against a real service: control/sdk/scenarios.json, which the Python library runs too. */
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, beforeEach, describe, it } from 'vitest';
import { DSecClient } from '../sdk/typescript/src/index.ts';
import { type ScenarioStep, takeStep } from './sdk/scenario-checks.ts';
import type { Site } from './sdk/scenario-steps.ts';
import { canRun, IMAGE, makeWorld, root, type World } from './sdk/world.ts';

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
        await takeStep(site, step, label);
      }
    });
  }
});
