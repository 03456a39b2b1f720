/**
 * Where an NBD server listens: `unix:/path` or `tcp:HOST:PORT`. There is no password and no encryption, so TCP is for this machine
 * alone, where file permissions guard the socket and loopback everything else.
 */
import { resolve } from 'node:path';
import { fail } from '../../errors.ts';

export type NbdAddress =
  | { readonly kind: 'unix'; readonly path: string }
  | { readonly kind: 'tcp'; readonly host: string; readonly port: number };

/** sun_path has 108 bytes, the last one a NUL. */
const MAX_PATH_BYTES = 107;

/** @throws NBD_ADDRESS */
export function parseNbdAddress(text: string): NbdAddress {
  const refuse = (problem: string) => fail('NBD_ADDRESS', { address: text, problem });
  if (text.startsWith('unix:')) {
    const path = text.slice('unix:'.length);
    if (path === '') throw refuse('it names no socket');
    if (path.includes('\0')) throw refuse('a path has no NUL byte');
    if (Buffer.byteLength(resolve(path)) > MAX_PATH_BYTES) {
      throw refuse(`the path of a socket has at most ${MAX_PATH_BYTES} bytes`);
    }
    return { kind: 'unix', path: resolve(path) };
  }
  const match = /^tcp:(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9.-]+)):(\d{1,5})$/.exec(text);
  if (match === null) throw refuse('neither unix:PATH nor tcp:HOST:PORT');
  const host = (match[1] ?? match[2])!;
  const port = Number(match[3]);
  if (port > 65_535) throw refuse('ports end at 65535');
  if (!/^(?:127(?:\.\d{1,3}){3}|::1|localhost)$/.test(host)) {
    throw refuse('NBD has no passwords: it is served on loopback only (127.0.0.1, ::1, localhost)');
  }
  return { kind: 'tcp', host, port };
}

/** As `unix:PATH` or `tcp:HOST:PORT`. */
export function addressText(address: NbdAddress): string {
  return address.kind === 'unix' ? `unix:${address.path}` : `tcp:${hostText(address.host)}:${address.port}`;
}

/** What qemu, nbdinfo and their like take. */
export function nbdUri(address: NbdAddress, name: string): string {
  // Quotes and blanks would need quoting in a shell, too.
  const quoted = (text: string) => encodeURIComponent(text).replaceAll("'", '%27');
  if (address.kind === 'tcp') return `nbd://${hostText(address.host)}:${address.port}/${quoted(name)}`;
  return `nbd+unix:///${quoted(name)}?socket=${quoted(address.path).replaceAll('%2F', '/')}`;
}

function hostText(host: string): string {
  return host.includes(':') ? `[${host}]` : host;
}
