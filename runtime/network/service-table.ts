/**
 * What a named service of a policy ("pypi": true) stands for: the names and ranges of its servers, or of the deployment's mirrors of it. The
 * file $DSEC_NETWORK_SERVICES (/etc/dsec/network-services.json) adds to the table and replaces rows of it:
 *
 *     { "pypi": { "targets": ["pypi.mirror.corp"], "ports": [443], "inside": true } }
 */
import { readFileSync } from 'node:fs';
import { messageOf, systemCode } from '#base';
import { fail } from '../errors.ts';
import { parsePolicy } from './policy.ts';

export interface NetworkService {
  readonly targets: readonly string[];
  readonly ports: readonly (number | string)[];
  /** Private addresses in the answers are opened: it is a mirror of the deployment's own. */
  readonly inside?: boolean;
}

export type ServiceTable = Readonly<Record<string, NetworkService>>;

const WEB = [80, 443];
const TLS = [443];

export const BUILT_IN_SERVICES: ServiceTable = {
  crates: { targets: ['crates.io', 'index.crates.io', 'static.crates.io'], ports: TLS },
  debian: { targets: ['deb.debian.org', 'security.debian.org', 'ftp.debian.org'], ports: WEB },
  dockerhub: {
    targets: ['registry-1.docker.io', 'auth.docker.io', 'index.docker.io', 'production.cloudflare.docker.com'],
    ports: TLS,
  },
  github: {
    targets: ['github.com', 'api.github.com', 'codeload.github.com', '*.githubusercontent.com'],
    ports: [22, 443],
  },
  go: { targets: ['proxy.golang.org', 'sum.golang.org', 'go.dev', 'dl.google.com'], ports: TLS },
  maven: { targets: ['repo1.maven.org', 'repo.maven.apache.org'], ports: TLS },
  npm: { targets: ['registry.npmjs.org'], ports: TLS },
  pypi: { targets: ['pypi.org', 'files.pythonhosted.org'], ports: TLS },
  rubygems: { targets: ['rubygems.org', 'index.rubygems.org'], ports: TLS },
  ubuntu: { targets: ['archive.ubuntu.com', 'security.ubuntu.com', 'ports.ubuntu.com'], ports: WEB },
};

export function serviceTablePath(env: NodeJS.ProcessEnv = process.env): string {
  return env.DSEC_NETWORK_SERVICES || '/etc/dsec/network-services.json';
}

/** Read anew each time: a change of the file holds for the next policy that is set. @throws RUNTIME_NETWORK_SERVICES */
export function readServiceTable(path: string = serviceTablePath()): ServiceTable {
  let text: string;
  try {
    text = readFileSync(path, 'utf8');
  } catch (error) {
    if (systemCode(error) === 'ENOENT' && path === '/etc/dsec/network-services.json') return BUILT_IN_SERVICES;
    throw fail('RUNTIME_NETWORK_SERVICES', { path, problem: messageOf(error) }, error);
  }
  try {
    return { ...BUILT_IN_SERVICES, ...parseServices(JSON.parse(text)) };
  } catch (error) {
    throw fail('RUNTIME_NETWORK_SERVICES', { path, problem: messageOf(error) }, error);
  }
}

function parseServices(value: unknown): ServiceTable {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) throw new Error('it is no JSON object');
  return Object.fromEntries(Object.entries(value).map(([name, row]) => [name, parseService(name, row)]));
}

function parseService(name: string, row: unknown): NetworkService {
  const { targets, ports = [], inside, ...unknown } = (row ?? {}) as Partial<NetworkService>;
  const [other] = Object.keys(unknown);
  if (other !== undefined)
    throw new Error(`service "${name}": "${other}" is not known; it may have targets, ports, inside`);
  if (!Array.isArray(targets) || targets.length === 0)
    throw new Error(`service "${name}": "targets" are a list of names and ranges`);
  // What a policy would not take is no service either.
  parsePolicy({ rules: targets.map((allow: unknown) => ({ allow, ports })) });
  if (inside !== undefined && typeof inside !== 'boolean')
    throw new Error(`service "${name}": "inside" is true or false`);
  return { targets, ports, inside };
}
