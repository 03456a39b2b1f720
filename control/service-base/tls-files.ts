/** Certificates of a service, as both ends of a connection want them. Read anew when a service is told to (SIGHUP), so that they can be renewed. */
import { readFileSync } from 'node:fs';
import { createSecureContext } from 'node:tls';
import { messageOf } from '#base';
import { fail } from '../errors.ts';

/** Of a server: its certificate and key; `clientCaFile`: only whoever has a certificate of that authority may connect. */
export interface ServerTlsFiles {
  readonly certFile: string;
  readonly keyFile: string;
  readonly clientCaFile?: string;
}

/** Of a client: who vouches for servers (the system's authorities by default), and what it shows where they want to see one. */
export interface ClientTlsFiles {
  readonly caFile?: string;
  readonly certFile?: string;
  readonly keyFile?: string;
}

export interface TlsBytes {
  readonly cert?: Buffer;
  readonly key?: Buffer;
  readonly ca?: Buffer;
}

/** @throws SERVICE_TLS_FILE */
export function serverTls({ certFile, keyFile, clientCaFile }: ServerTlsFiles) {
  const ca = clientCaFile === undefined ? undefined : bytesOf(clientCaFile);
  const bytes = usable({ cert: bytesOf(certFile), key: bytesOf(keyFile), ca }, `${certFile}, ${keyFile}`);
  return { ...bytes, requestCert: ca !== undefined, rejectUnauthorized: ca !== undefined };
}

/** @throws SERVICE_TLS_FILE */
export function clientTls({ caFile, certFile, keyFile }: ClientTlsFiles): TlsBytes {
  const read = (file: string | undefined) => (file === undefined ? undefined : bytesOf(file));
  const all = [caFile, certFile, keyFile].filter((file) => file !== undefined);
  return usable({ ca: read(caFile), cert: read(certFile), key: read(keyFile) }, all.join(', '));
}

/** What is no certificate is found at the start, not by the first connection. */
function usable<T extends TlsBytes>(bytes: T, files: string): T {
  try {
    createSecureContext(bytes);
    return bytes;
  } catch (error) {
    throw fail('SERVICE_TLS_FILE', { file: files, problem: messageOf(error) }, error);
  }
}

function bytesOf(file: string): Buffer {
  try {
    return readFileSync(file);
  } catch (error) {
    throw fail('SERVICE_TLS_FILE', { file, problem: messageOf(error) }, error);
  }
}
