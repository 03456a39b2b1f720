/**
 * What is used of the SDK, by name. `import()` of this file instead of the package: a bundler knows the names of a CommonJS package only
 * where it is imported statically, and the SDK must not be loaded before it is needed.
 */
export {
  AbortMultipartUploadCommand,
  CompleteMultipartUploadCommand,
  CreateMultipartUploadCommand,
  DeleteObjectCommand,
  HeadObjectCommand,
  ListMultipartUploadsCommand,
  PutObjectCommand,
  S3Client,
  UploadPartCommand,
} from '@aws-sdk/client-s3';
