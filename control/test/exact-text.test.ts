/** Names that are not UTF-8, given on the command line: byte for byte where that can be, refused where it cannot. */
import { spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { bytesOf, displayText, fromText, nodePath, textOf } from '#base';
import { exactArguments } from '../cli/exact-text.ts';

const dsec = join(import.meta.dirname, '../../bin/dsec');

describe('text with stand-ins', () => {
  it.each(['plain', 'gr\u00fc\u00df \u6f22 \u{1f600}', 'a \ufffd that is one'])(
    '%s is UTF-8, and stays as it is',
    (text) => {
      expect(textOf(Buffer.from(text))).toBe(text);
      expect(displayText(text)).toBe(text);
      expect(nodePath(text)).toBe(text);
    },
  );

  it('keeps every byte, whatever the bytes are', () => {
    const samples = [
      'ff',
      '61ff62',
      'e9',
      'c3',
      'e282',
      'f09f98',
      'eda080',
      'edb3bf',
      'c0af',
      'f5808080',
      '80ffefbfbd',
    ];
    let seed = 1;
    for (let n = 0; n < 300; n++) {
      const bytes = Array.from({ length: 12 }, () => {
        seed = (seed * 1103515245 + 12345) & 0x7fffffff;
        return (seed >> 16) & 0xff;
      });
      samples.push(Buffer.from(bytes).toString('hex'));
    }
    for (const hex of samples) {
      const bytes = Buffer.from(hex, 'hex');
      const text = textOf(bytes);
      expect(bytesOf(fromText(text)).toString('hex')).toBe(hex);
      expect(Buffer.from(nodePath(text)).toString('hex')).toBe(hex);
      expect(bytesOf(fromText(JSON.parse(JSON.stringify(text)))).toString('hex')).toBe(hex);
    }
  });

  it('is for people with the bytes named', () => {
    expect(displayText(textOf(Buffer.from('a\xff\xfcb', 'latin1')))).toBe('a\\xff\\xfcb');
  });

  it('arguments are those of the process, or left alone', () => {
    const line = () => Buffer.from('node\0dsec\0cat\0/\xff\0', 'latin1');
    expect(exactArguments(['cat', '/\ufffd'], line)).toEqual(['cat', '/\udcff']);
    expect(exactArguments(['cat', '/other\ufffd'], line)).toEqual(['cat', '/other\ufffd']);
    expect(
      exactArguments(['cat', '/plain'], () => {
        throw new Error('not read');
      }),
    ).toEqual(['cat', '/plain']);
  });
});

describe('dsec', () => {
  let folder: string;
  const LATIN = Buffer.from('caf\xe9', 'latin1');
  /** `$N` is the name. */
  const sh = (line: string, env: NodeJS.ProcessEnv = {}) => {
    const ran = spawnSync('sh', ['-c', `N=$(printf 'caf\\351'); dsec() { "$NODE" "$DSEC" "$@"; }; ${line}`], {
      cwd: folder,
      env: { ...process.env, ...env, NODE: process.execPath, DSEC: dsec, DSEC_STORE: join(folder, 'store') },
    });
    return { status: ran.status, stdout: ran.stdout.toString('latin1'), stderr: ran.stderr.toString('latin1') };
  };
  beforeAll(() => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-exact-'));
    const inTree = Buffer.concat([Buffer.from(join(folder, 'tree/')), LATIN]);
    mkdirSync(join(folder, 'tree'));
    mkdirSync(inTree);
    writeFileSync(Buffer.concat([inTree, Buffer.from('/file')]), 'found\n');
    expect(sh('dsec convert dir:tree --name a:1')).toMatchObject({ status: 0 });
  });
  afterAll(() => rmSync(folder, { recursive: true, force: true }));

  it('finds them in an image', () => {
    expect(sh('dsec cat a:1 "/$N/file"')).toEqual({ status: 0, stdout: 'found\n', stderr: '' });
    expect(sh('dsec ls a:1 "/$N"')).toEqual({ status: 0, stdout: 'file\n', stderr: '' });
    expect(sh('dsec stat a:1 "/$N/file"').stdout).toContain('File: /caf\\xe9/file');
    expect(sh('dsec dump a:1 "/$N/file"')).toMatchObject({ status: 0, stderr: '' });
    const missing = sh('dsec cat a:1 "/x$N"');
    expect(missing.status).not.toBe(0);
    expect(missing.stderr).toContain('/xcaf\\xe9');
  });

  it('writes an export to one', () => {
    expect(sh('dsec export a:1 -o "$N.tar"')).toMatchObject({ status: 0, stderr: expect.stringContaining('caf\\xe9') });
    expect(readdirSync(folder, { encoding: 'latin1' as BufferEncoding })).toContain('caf\xe9.tar');
  });

  it.skipIf(process.getuid?.() !== 0)('mounts on one', () => {
    const env = { DSEC_RUN: join(folder, 'run'), DSEC_CACHE: join(folder, 'cache') };
    const line = 'mkdir "$N"; dsec mount a:1 "$N" && cat "$N/$N/file"; dsec mounts; dsec umount "$N"; ls "$N"';
    const ran = sh(line, env);
    expect(ran).toMatchObject({ status: 0, stderr: '' });
    expect(ran.stdout).toMatch(/\nfound\n/);
    expect(ran.stdout).toMatch(/ .*caf\\xe9/);
    expect(ran.stdout).toMatch(/unmounted .*\/caf\\xe9\n$/);
    expect(readFileSync('/proc/self/mountinfo', 'latin1')).not.toContain(folder);
  });

  it('refuses them where they cannot pass, and names which', () => {
    const refused = (line: string, what: string, env?: NodeJS.ProcessEnv) => {
      const { status, stderr } = sh(line, env);
      expect(stderr).toContain(`${what} is not valid UTF-8`);
      expect(stderr).toContain('caf\\xe9');
      expect(status).toBe(2);
    };
    refused('dsec run a:1 -- echo "$N"', 'dsec run: argument 3');
    refused('dsec run -e "X=$N" a:1 -- true', 'dsec run: option --env');
    refused('export X="$N"; dsec run -e X a:1 -- true', 'dsec run: variable X');
    refused('dsec convert "dir:$N" --name b:1', 'dsec convert: argument 1');
    refused('DSEC_CACHE="/$N" dsec ls a:1', 'dsec ls: variable DSEC_CACHE');
    // Not asked for: it never reaches the sandbox.
    const other = sh('export X="$N"; dsec run -e Y no-such:1 -- true');
    expect(other.stderr).not.toContain('UTF-8');
  });
});
