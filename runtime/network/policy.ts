/**
 * What a sandbox may reach, as people write it and as it is on record: JSON, everything in it known, everything unknown refused.
 *
 *     { "default": "deny",
 *       "rules": [ { "allow": "*.debian.org", "ports": [80, 443], "protocol": "tcp" },
 *                  { "allow": "10.2.0.0/16", "ports": ["8000-8100"] },
 *                  { "deny": "10.2.3.4" } ],
 *       "services": { "pypi": true, "npm": false } }
 *
 * A rule is about addresses or about a name. Of several about the same address, the one for the smallest range that says something about the
 * port and protocol decides; for the same range `deny` does. Of names: an exact one before a wildcard, the longest wildcard before others.
 * `deny` of a range closes it to answers of the resolver too. What the node keeps closed (loopback, metadata, other sandboxes) no rule opens.
 */
import { fail } from '../errors.ts';
import { type AddressRange, parseRange } from './address.ts';
import type { ServiceTable } from './service-table.ts';

export const PROTOCOLS = ['any', 'tcp', 'udp', 'icmp'] as const;
export type PolicyProtocol = (typeof PROTOCOLS)[number];

export interface WrittenRule {
  /** A CIDR range, an address, or a name ("example.org", "*.example.org": all below it). One of the two. */
  readonly allow?: string;
  readonly deny?: string;
  /** Numbers and ranges ("8000-8100"); none: all. Of tcp and udp. */
  readonly ports?: readonly (number | string)[];
  /** `any` by default, with ports: tcp and udp. */
  readonly protocol?: PolicyProtocol;
  /** Of a name: its answers may be private addresses, as those of the deployment's own mirrors are. */
  readonly inside?: boolean;
}

export interface NetworkPolicy {
  /** What no rule speaks of. */
  readonly default: 'deny' | 'allow';
  readonly rules: readonly WrittenRule[];
  /** Names of the service table: opened, or closed. */
  readonly services: Readonly<Record<string, boolean>>;
}

export const DENY_ALL: NetworkPolicy = { default: 'deny', rules: [], services: {} };

interface Scope {
  readonly action: 'allow' | 'deny';
  readonly protocol: PolicyProtocol;
  /** From, to; at least one. */
  readonly ports: readonly (readonly [number, number])[];
}

export interface AddressRule extends Scope {
  readonly range: AddressRange;
}

export interface NameRule extends Scope {
  /** Lower case; "*.example.org" is all below example.org. */
  readonly pattern: string;
  readonly inside: boolean;
}

/** A policy with its services looked up: what is enforced. */
export interface EffectivePolicy {
  readonly default: 'deny' | 'allow';
  readonly addresses: readonly AddressRule[];
  readonly names: readonly NameRule[];
}

const MAX_RULES = 1000;
const ALL_PORTS: readonly (readonly [number, number])[] = [[0, 65535]];

/** Of JSON, from a file or a request. @throws RUNTIME_NETWORK_POLICY */
export function parsePolicy(value: unknown): NetworkPolicy {
  if (!isObject(value)) throw problem('the policy', 'it is no JSON object');
  refuseUnknown(value, ['default', 'rules', 'services'], 'the policy');
  const preset = value.default ?? 'deny';
  if (preset !== 'deny' && preset !== 'allow') throw problem('"default"', 'it is "deny" or "allow"');
  const rules = value.rules ?? [];
  if (!Array.isArray(rules) || rules.length > MAX_RULES) {
    throw problem('"rules"', `they are a list of at most ${MAX_RULES} objects`);
  }
  const services = value.services ?? {};
  if (!isObject(services)) throw problem('"services"', 'they are an object of names with true or false');
  for (const [name, open] of Object.entries(services)) {
    if (typeof open !== 'boolean') throw problem(`service "${name}"`, 'it is true (open) or false (closed)');
  }
  const policy = {
    default: preset,
    rules: rules.map(writtenRule),
    services: services as Record<string, boolean>,
  } as const;
  for (const rule of policy.rules) parseRule(rule);
  return policy;
}

/**
 * Its services as rules, so that what is on record holds whatever becomes of the table.
 * @throws RUNTIME_NETWORK_POLICY for a service that the table lacks
 */
export function expandServices(policy: NetworkPolicy, table: ServiceTable): NetworkPolicy {
  const rules = [...policy.rules];
  for (const [name, open] of Object.entries(policy.services)) {
    const service = Object.hasOwn(table, name) ? table[name] : undefined;
    if (service === undefined) {
      const known = Object.keys(table).sort().join(', ');
      throw problem(`service "${name}"`, `the table of services has ${known}`);
    }
    for (const target of service.targets) {
      if (!open) rules.push({ deny: target });
      else if (parseRange(target) !== undefined) rules.push({ allow: target, ports: service.ports });
      else rules.push({ allow: target, ports: service.ports, inside: service.inside ?? false });
    }
  }
  return { default: policy.default, rules, services: {} };
}

/** @param table Without it, of one whose services are rules already. @throws RUNTIME_NETWORK_POLICY */
export function effectivePolicy(policy: NetworkPolicy, table: ServiceTable = {}): EffectivePolicy {
  const rules = expandServices(policy, table).rules.map(parseRule);
  return {
    default: policy.default,
    addresses: rules.filter((rule): rule is AddressRule => 'range' in rule),
    names: rules.filter((rule): rule is NameRule => 'pattern' in rule),
  };
}

function writtenRule(value: unknown, index: number): WrittenRule {
  const what = `rule ${index + 1}`;
  if (!isObject(value)) throw problem(what, 'it is no object');
  refuseUnknown(value, ['allow', 'deny', 'ports', 'protocol', 'inside'], what);
  const { allow, deny, ports, protocol, inside } = value;
  if ((allow === undefined) === (deny === undefined) || typeof (allow ?? deny) !== 'string') {
    throw problem(what, 'it has one of "allow" and "deny", with an address, a range or a name');
  }
  if (
    ports !== undefined &&
    !(Array.isArray(ports) && ports.every((one) => ['number', 'string'].includes(typeof one)))
  ) {
    throw problem(what, '"ports" is a list of numbers and ranges, as in [443, "8000-8100"]');
  }
  if (protocol !== undefined && !PROTOCOLS.includes(protocol as PolicyProtocol)) {
    throw problem(what, `"protocol" is one of ${PROTOCOLS.join(', ')}`);
  }
  if (inside !== undefined && typeof inside !== 'boolean') throw problem(what, '"inside" is true or false');
  return value as WrittenRule;
}

function parseRule(rule: WrittenRule): AddressRule | NameRule {
  const target = (rule.allow ?? rule.deny)!;
  const what = `rule for "${target}"`;
  const { protocol = 'any' } = rule;
  const ports = (rule.ports ?? []).map((port) => portRange(port, what));
  if (protocol === 'icmp' && ports.length > 0) throw problem(what, 'icmp has no ports');
  const scope: Scope = {
    action: rule.allow === undefined ? 'deny' : 'allow',
    protocol,
    ports: ports.length === 0 ? ALL_PORTS : ports,
  };
  const range = parseRange(target);
  if (range !== undefined) {
    if (rule.inside === true) throw problem(what, '"inside" is about names');
    return { ...scope, range };
  }
  const pattern = target.toLowerCase().replace(/\.$/, '');
  if (!isPattern(pattern)) {
    throw problem(what, 'it is no address, no range (10.0.0.0/8, its bits after the prefix 0) and no name');
  }
  if (scope.action === 'deny' && (ports.length > 0 || protocol !== 'any')) {
    throw problem(what, 'a name is denied as a whole: without ports and protocol');
  }
  return { ...scope, pattern, inside: rule.inside ?? false };
}

const LABELS = /^(\*\.)?[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*$/;

function isPattern(pattern: string): boolean {
  const last = pattern.slice(pattern.lastIndexOf('.') + 1);
  // What ends in a number is an address that somebody mistyped.
  return LABELS.test(pattern) && pattern.length <= 253 && !/^\d+$/.test(last);
}

function portRange(port: number | string, what: string): readonly [number, number] {
  const found = /^(\d{1,5})(?:-(\d{1,5}))?$/.exec(String(port));
  const [from, to] = [Number(found?.[1]), Number(found?.[2] ?? found?.[1])];
  if (found === null || from > to || to > 65535 || from < 1) {
    throw problem(what, `port ${port}: ports are 1 to 65535, ranges are written "8000-8100"`);
  }
  return [from, to];
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

function refuseUnknown(value: Record<string, unknown>, known: readonly string[], what: string): void {
  const unknown = Object.keys(value).find((key) => !known.includes(key));
  if (unknown !== undefined) throw problem(what, `"${unknown}" is not known; it may have ${known.join(', ')}`);
}

function problem(what: string, text: string) {
  return fail('RUNTIME_NETWORK_POLICY', { what, problem: text });
}
