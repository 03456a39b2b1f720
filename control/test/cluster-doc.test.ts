/** What docs/cluster.md gives to be copied: systemd takes the units, and Compose's form holds for the file. */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Type } from '@sinclair/typebox';
import { Value } from '@sinclair/typebox/value';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { parse } from 'yaml';

const doc = readFileSync(join(import.meta.dirname, '../../docs/cluster.md'), 'utf8');
const hasSystemd = spawnSync('systemd-analyze', ['--version']).status === 0;
if (!hasSystemd) console.log('skipped: there is no systemd-analyze');

/** Indented blocks, without their indent. */
const blocks = doc
  .split(/\n(?! {4}|\n)/)
  .flatMap((part) => /\n\n?((?: {4}.*\n?|\n)+)$/.exec(`\n${part}\n`)?.[1] ?? [])
  .map((block) => block.replace(/^ {4}/gm, '').trim());
const units = blocks.filter((block) => block.startsWith('[Unit]'));

describe('docs/cluster.md', () => {
  let folder: string;
  beforeAll(() => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-units-'));
  });
  afterAll(() => rmSync(folder, { recursive: true, force: true }));

  it.skipIf(!hasSystemd)('has units that systemd takes', () => {
    const served = units.map((unit) => /dsec serve (\w+)/.exec(unit)?.[1]);
    expect(served).toEqual(['edge', 'watcher', 'apiserver', 'imagesvc', 'fncall', 'all']);
    for (const [at, unit] of units.entries()) {
      const path = join(folder, `dsec-${at}.service`);
      // The program is not installed where tests run.
      writeFileSync(path, unit.replaceAll('/opt/dsec/bin/dsec', '/bin/true'));
      const { status, stderr, stdout } = spawnSync('systemd-analyze', ['verify', '--man=no', path], {
        encoding: 'utf8',
      });
      const about = `${stdout}${stderr}`.split('\n').filter((line) => line.includes(path));
      expect([about, status]).toEqual([[], 0]);
    }
  });

  it('reloads no unit whose secrets are systemd’s copies of when it started', () => {
    const copied = units.filter((unit) => unit.includes('LoadCredential='));
    expect(copied.map((unit) => /dsec serve (\w+)/.exec(unit)?.[1])).toEqual(['watcher', 'apiserver', 'imagesvc']);
    expect(copied.filter((unit) => unit.includes('ExecReload='))).toEqual([]);
  });

  it('has options in its units and its Compose file that the commands have', async () => {
    const commands = readFileSync(join(import.meta.dirname, '../../docs/commands.md'), 'utf8');
    const options = [...blocks.join('\n').matchAll(/(?<!\w)--[a-z][a-z-]+/g)].map(([option]) => option);
    expect(options.length).toBeGreaterThan(10);
    expect(options.filter((option) => !commands.includes(`${option} `) && !commands.includes(`${option}\``))).toEqual(
      [],
    );
  });

  it('has a Compose file of Compose’s form', () => {
    const text = blocks.find((block) => block.startsWith('services:'));
    const Texts = Type.Array(Type.String());
    const Service = Type.Object(
      {
        image: Type.String(),
        command: Type.String(),
        environment: Type.Record(Type.String(), Type.String()),
        restart: Type.Union(['no', 'always', 'on-failure', 'unless-stopped'].map((word) => Type.Literal(word))),
        privileged: Type.Optional(Type.Boolean()),
        cgroup: Type.Optional(Type.Union([Type.Literal('host'), Type.Literal('private')])),
        volumes: Type.Optional(Texts),
        ports: Type.Optional(Texts),
      },
      { additionalProperties: false },
    );
    const Compose = Type.Object(
      { services: Type.Record(Type.String(), Service), volumes: Type.Record(Type.String(), Type.Null()) },
      { additionalProperties: false },
    );
    const read = parse(text ?? '') as {
      services: Record<string, { command: string; volumes?: string[] }>;
      volumes: object;
    };
    expect([...Value.Errors(Compose, read)]).toEqual([]);
    expect(Object.keys(read.services).sort()).toEqual(['api', 'edge', 'images', 'watcher']);
    for (const { command, volumes = [] } of Object.values(read.services)) {
      expect(command).toMatch(/^dsec serve (apiserver|edge|imagesvc|watcher) /);
      for (const volume of volumes.filter((one) => !one.startsWith('/'))) {
        expect(Object.keys(read.volumes)).toContain(volume.split(':')[0]);
      }
    }
  });
});
