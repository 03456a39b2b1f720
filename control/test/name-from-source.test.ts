import { describe, expect, it } from 'vitest';
import { nameFromSource } from '../cli/name-from-source.ts';

describe('nameFromSource', () => {
  it.each([
    ['docker://docker.io/library/alpine:3.20', 'alpine:3.20'],
    ['docker://127.0.0.1:5000/team/web:1', 'team/web:1'],
    ['docker://localhost/web', 'web:latest'],
    ['docker://alpine', 'alpine:latest'],
    [`docker://registry.example/web:1@sha256:${'0'.repeat(64)}`, 'web:1'],
    [`docker://registry.example/web@sha256:${'0'.repeat(64)}`, undefined],
    ['oci:/srv/images:web', 'images:web'],
    ['oci:/srv/images', undefined],
    ['oci-archive:/srv/web.tar:1', 'web:1'],
    ['oci:/srv/Odd Name:1', undefined],
    ['dir:/srv/tree', undefined],
    ['tar:/srv/x.tar', undefined],
  ])('%s -> %s', (source, expected) => expect(nameFromSource(source)).toBe(expected));
});
