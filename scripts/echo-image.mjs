/**
 * Makes the disk of the smallest machine that can be watched, for trying full machines and for their tests: a boot sector that says `R` on the serial line and
 * `>` on the screen, and then repeats every key on both.
 *
 *     node scripts/echo-image.mjs echo.raw              the disk
 *     node scripts/echo-image.mjs --image echo:1        an image of it in the store ($DSEC_STORE)
 */
import { execFileSync } from 'node:child_process';
import { mkdtempSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { argv, env, exit } from 'node:process';
import { fileURLToPath } from 'node:url';

const CODE = [
  ...[0xb8, 0x03, 0x00, 0xcd, 0x10], // text, 80 x 25
  ...[0xb8, 0xe3, 0x00, 0x31, 0xd2, 0xcd, 0x14], // COM1: 9600 bits, 8N1
  ...[0xb0, 0x52, 0xb4, 0x01, 0xcd, 0x14], // R
  ...[0xb4, 0x0e, 0xb0, 0x3e, 0xcd, 0x10], // >
  ...[0x30, 0xe4, 0xcd, 0x16], // a key
  ...[0xb4, 0x0e, 0xcd, 0x10], // on the screen
  ...[0xb4, 0x01, 0x31, 0xd2, 0xcd, 0x14], // on the line
  ...[0xeb, 0xf0],
];
const DISK_BYTES = 4 << 20;

/** @param {string} path */
function makeDisk(path) {
  const sector = Buffer.alloc(512);
  sector.set(CODE);
  sector.writeUInt16LE(0xaa55, 510);
  writeFileSync(path, sector);
  truncateSync(path, DISK_BYTES);
}

/** @param {string} name */
function makeImage(name) {
  const folder = mkdtempSync(join(tmpdir(), 'dsec-echo-'));
  const program = fileURLToPath(new URL('../bin/dsec', import.meta.url));
  const own = { ...env, DSEC_DISKS: join(folder, 'disks') };
  /** @param {string[]} args */
  const dsec = (...args) => execFileSync(program, args, { env: own, stdio: ['ignore', 'ignore', 'inherit'] });
  try {
    makeDisk(join(folder, 'echo.raw'));
    dsec('disk', 'create', 'echo', '--from', `raw:${join(folder, 'echo.raw')}`);
    dsec('disk', 'pack-diff', 'echo', '--name', name);
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

const [first, name] = argv.slice(2);
if (first === '--image' && name !== undefined) makeImage(name);
else if (first !== undefined && !first.startsWith('-') && name === undefined) makeDisk(first);
else {
  console.error('usage: node scripts/echo-image.mjs DISK | --image NAME:TAG');
  exit(2);
}
