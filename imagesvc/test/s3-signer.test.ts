import { describe, expect, test } from 'vitest';
import { encodePath, encodeQuery, S3Signer } from '../store/s3-signer.ts';
import { addressOf, parseS3Url } from '../store/s3-url.ts';

/** The worked examples of "Authenticating Requests: Using the Authorization Header" in the S3 API reference. */
describe('Signature Version 4', () => {
  const credentials = {
    accessKeyId: 'AKIAIOSFODNN7EXAMPLE',
    secretAccessKey: 'wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY',
  };
  const now = new Date('2013-05-24T00:00:00Z');
  const host = 'examplebucket.s3.amazonaws.com';
  const signature = (request: Omit<Parameters<S3Signer['sign']>[0], 'method' | 'host'>) =>
    new S3Signer('us-east-1').sign({ method: 'GET', host, ...request }, credentials, now).authorization;

  test('of a ranged read', () => {
    expect(signature({ path: '/test.txt', headers: { range: 'bytes=0-9' } })).toBe(
      'AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, ' +
        'SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, ' +
        'Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41',
    );
  });

  test('of a list', () => {
    const query = [
      ['prefix', 'J'],
      ['max-keys', '2'],
    ] as const;
    expect(signature({ path: '/', query })).toMatch(
      /Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7$/,
    );
    expect(signature({ path: '/', query: [['lifecycle', '']] })).toMatch(
      /Signature=fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543$/,
    );
  });

  test('a session token is sent and signed, and a new day or secret makes a new key', () => {
    const signer = new S3Signer('us-east-1');
    const request = { method: 'GET', host, path: '/x' } as const;
    const first = signer.sign(request, { ...credentials, sessionToken: 'T' }, now);
    expect(first['x-amz-security-token']).toBe('T');
    expect(first.authorization).toContain('x-amz-date;x-amz-security-token');
    const again = () => new S3Signer('us-east-1').sign(request, credentials, new Date('2013-05-25T00:00:00Z'));
    expect(signer.sign(request, credentials, new Date('2013-05-25T00:00:00Z'))).toEqual(again());
    expect(signer.sign(request, { ...credentials, secretAccessKey: 'other' }, now).authorization).not.toBe(
      signer.sign(request, credentials, now).authorization,
    );
  });

  test('what needs encoding', () => {
    expect(encodePath("a b/c+d/ü!'()*~")).toBe('a%20b/c%2Bd/%C3%BC%21%27%28%29%2A~');
    expect(
      encodeQuery([
        ['b', '1 2'],
        ['a', 'x/y'],
        ['a', ''],
      ]),
    ).toBe('a=&a=x%2Fy&b=1%202');
  });
});

describe('URLs of S3 stores', () => {
  const address = (url: string, env = {}) => {
    const location = parseS3Url(url, env);
    return addressOf(location, location.region ?? 'us-east-1');
  };

  test('of AWS: the bucket in the host, or in the path where its name has dots', () => {
    expect(address('s3://bucket/p?region=eu-west-1')).toEqual({
      origin: 'https://bucket.s3.eu-west-1.amazonaws.com',
      host: 'bucket.s3.eu-west-1.amazonaws.com',
      path: '/',
    });
    expect(address('s3://my.bucket', { AWS_REGION: 'cn-north-1' })).toEqual({
      origin: 'https://s3.cn-north-1.amazonaws.com.cn',
      host: 's3.cn-north-1.amazonaws.com.cn',
      path: '/my.bucket/',
    });
  });

  test('of other servers: the bucket in the path, unless asked otherwise', () => {
    expect(address('s3://bucket/p?endpoint=http://127.0.0.1:9000').path).toBe('/bucket/');
    expect(address('s3://bucket/p', { AWS_ENDPOINT_URL: 'https://host/base' })).toEqual({
      origin: 'https://host',
      host: 'host',
      path: '/base/bucket/',
    });
    expect(address('s3://bucket/p?endpoint=http://host:9000&path-style=0').origin).toBe('http://bucket.host:9000');
  });

  test('options from the URL go before the environment', () => {
    const env = {
      AWS_REGION: 'a-1',
      AWS_ENDPOINT_URL: 'http://general',
      AWS_ENDPOINT_URL_S3: 'http://special',
      AWS_CA_BUNDLE: '/ca',
    };
    expect(parseS3Url('s3://bucket', env)).toMatchObject({
      region: 'a-1',
      endpoint: new URL('http://special'),
      caFile: '/ca',
      prefix: '',
    });
    expect(parseS3Url('s3://bucket/a%20b/c/?region=b-2&ca=/other&profile=p&anonymous', env)).toMatchObject({
      region: 'b-2',
      caFile: '/other',
      prefix: 'a b/c/',
      profile: 'p',
      anonymous: true,
    });
  });

  test.each([
    ['s3://', /bucket/],
    ['s3://a', /bucket/],
    ['s3://KEY:SECRET@bucket/x', /keys do not belong/],
    ['s3://bucket//x', /empty part/],
    ['s3://bucket/a/../b', /"\.\."/],
    ['s3://bucket/%00', /control character/],
    ['s3://bucket/%zz', /URI/],
    ['s3://bucket/x#y', /write s3/],
    ['s3://bucket?endpoint=127.0.0.1:9000', /http:\/\//],
    ['s3://bucket?endpoint=ftp://x', /http:\/\//],
    ['s3://bucket?endpoint=http://u:p@host', /scheme, host/],
    ['s3://bucket?secret=x', /no option "secret"/],
    ['s3://bucket?region=a&region=b', /twice/],
    ['s3://bucket?path-style=maybe', /1 or 0/],
  ])('%s is refused', (url, why) => {
    expect(() => parseS3Url(url, {})).toThrow(why);
    expect(() => parseS3Url(url, {})).toThrow(expect.objectContaining({ code: 'STORE_URL', exit: 2 }));
  });

  test('secrets are not shown', () => {
    expect(parseS3Url('s3://bucket/x?signed-query=Signature%3Dabc&anonymous=1', {}).url).toBe(
      's3://bucket/x?signed-query=…&anonymous=1',
    );
    expect(() => parseS3Url('s3://KEY:SECRET@bucket/x', {})).toThrow(/^"s3:\/\/…@bucket\/x"/);
  });
});
