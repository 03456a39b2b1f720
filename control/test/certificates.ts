/** An authority and certificates of it for tests, made by openssl: a server's for localhost, a client's. */
import { execFileSync, spawnSync } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';

export const hasOpenssl = spawnSync('openssl', ['version']).status === 0;

export function makeCertificates(folder: string) {
  const at = (name: string) => join(folder, name);
  const openssl = (...args: string[]) => execFileSync('openssl', args, { stdio: 'ignore' });
  const key = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes'];
  openssl(
    'req',
    '-x509',
    ...key,
    '-keyout',
    at('ca.key'),
    '-out',
    at('ca.crt'),
    '-days',
    '2',
    '-subj',
    '/CN=test authority',
  );
  for (const [name, extension] of [
    ['server', 'subjectAltName=DNS:localhost,IP:127.0.0.1'],
    ['client', 'extendedKeyUsage=clientAuth'],
  ] as const) {
    openssl('req', ...key, '-keyout', at(`${name}.key`), '-out', at(`${name}.csr`), '-subj', `/CN=${name}`);
    writeFileSync(at(`${name}.ext`), extension);
    const by = ['-CA', at('ca.crt'), '-CAkey', at('ca.key'), '-CAcreateserial', '-days', '2'];
    openssl('x509', '-req', '-in', at(`${name}.csr`), ...by, '-extfile', at(`${name}.ext`), '-out', at(`${name}.crt`));
  }
  return {
    ca: at('ca.crt'),
    server: { certFile: at('server.crt'), keyFile: at('server.key') },
    client: { certFile: at('client.crt'), keyFile: at('client.key') },
  };
}
