/** Rules of the command line, as the policies that they are. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { networkOf, policyOf } from '../cli/network-options.ts';

const allowed = (...allow: string[]) => policyOf({ allow }, 'dsec')?.rules;

describe('network options', () => {
  it.each([
    ['10.0.0.0/8', { allow: '10.0.0.0/8' }],
    ['10.0.0.0/8:443', { allow: '10.0.0.0/8', ports: ['443'] }],
    ['10.0.0.1:80,8000-8100/tcp', { allow: '10.0.0.1', ports: ['80', '8000-8100'], protocol: 'tcp' }],
    ['10.0.0.1:*/icmp', { allow: '10.0.0.1', protocol: 'icmp' }],
    ['*.example.org:443', { allow: '*.example.org', ports: ['443'] }],
    ['example.org', { allow: 'example.org' }],
    ['2001:db8::/32', { allow: '2001:db8::/32' }],
    ['[2001:db8::1]:53/udp', { allow: '2001:db8::1', ports: ['53'], protocol: 'udp' }],
  ])('%s', (text, rule) => {
    expect(allowed(text)).toEqual([rule]);
  });

  it('refuses what is none', () => {
    for (const text of ['', ':80', 'a b', '10.0.0.1:80:90/tcp', '[::1', '10.0.0.1:0', '10.0.0.0/33', 'a.org:80/x']) {
      expect(() => allowed(text), text).toThrow(expect.objectContaining({ exit: 2 }));
    }
  });

  it('does not take the name of a service for a host', () => {
    expect(() => allowed('pypi')).toThrow(
      expect.objectContaining({ code: 'CLI_USAGE', message: expect.stringContaining('@pypi') }),
    );
    expect(() => policyOf({ deny: ['npm:443'] }, 'dsec')).toThrow(expect.objectContaining({ exit: 2 }));
    expect(allowed('intranet')).toEqual([{ allow: 'intranet' }]);
  });

  it('adds to a file, and knows services', () => {
    const folder = mkdtempSync(join(tmpdir(), 'policy-'));
    const path = join(folder, 'policy.json');
    try {
      writeFileSync(path, '{"default": "allow", "rules": [{"allow": "a.org"}], "services": {"npm": true}}');
      expect(policyOf({ policy: path, deny: ['b.org', '@npm'], allow: ['@pypi'], default: 'deny' }, 'dsec')).toEqual({
        default: 'deny',
        rules: [{ allow: 'a.org' }, { deny: 'b.org' }],
        services: { npm: false, pypi: true },
      });
      writeFileSync(path, '{');
      expect(() => policyOf({ policy: path }, 'dsec')).toThrow(expect.objectContaining({ code: 'CLI_NETWORK_POLICY' }));
      expect(() => policyOf({ policy: `${path}.not` }, 'dsec')).toThrow(
        expect.objectContaining({ code: 'CLI_INPUT_UNREADABLE' }),
      );
    } finally {
      rmSync(folder, { recursive: true });
    }
  });

  it('knows what goes together', () => {
    expect(networkOf({}, 'dsec')).toBeUndefined();
    expect(networkOf({ network: 'host' }, 'dsec')).toEqual({ mode: 'host', policy: undefined });
    expect(networkOf({ network: 'policy' }, 'dsec')).toEqual({ mode: 'policy', policy: undefined });
    expect(networkOf({ allow: ['a.org'] }, 'dsec')).toMatchObject({ mode: 'policy', policy: { default: 'deny' } });
    expect(() => networkOf({ network: 'none', allow: ['a.org'] }, 'dsec')).toThrow(
      expect.objectContaining({ code: 'CLI_USAGE' }),
    );
    expect(() => networkOf({ network: 'bridge' }, 'dsec')).toThrow(expect.objectContaining({ code: 'CLI_USAGE' }));
    expect(() => policyOf({ default: 'open' }, 'dsec')).toThrow(
      expect.objectContaining({ code: 'RUNTIME_NETWORK_POLICY' }),
    );
  });
});
