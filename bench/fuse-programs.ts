/** The two programs in C that fuse-read.bench.ts compiles into its scratch folder. */

/** The peer: a read-only FUSE server over libfuse3's low-level interface, multi-threaded; shows one file, `f`, read with pread(2). */
export const FUSE_SERVER_C = `
#define FUSE_USE_VERSION 312
#include <fuse_lowlevel.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
static int data; static off_t size;
static void attr(fuse_ino_t ino, struct stat *st) {
  memset(st, 0, sizeof *st);
  st->st_ino = ino; st->st_nlink = ino == 1 ? 2 : 1;
  st->st_mode = ino == 1 ? S_IFDIR | 0500 : S_IFREG | 0400; st->st_size = ino == 1 ? 0 : size;
}
static void init(void *u, struct fuse_conn_info *c) { c->max_readahead = 1 << 20; }
static void lookup(fuse_req_t req, fuse_ino_t parent, const char *name) {
  struct fuse_entry_param e = { .ino = 2, .attr_timeout = 3600, .entry_timeout = 3600 };
  if (strcmp(name, "f")) { fuse_reply_err(req, ENOENT); return; }
  attr(2, &e.attr); fuse_reply_entry(req, &e);
}
static void getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi) {
  struct stat st; attr(ino, &st); fuse_reply_attr(req, &st, 3600);
}
static void do_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi) { fuse_reply_open(req, fi); }
static void do_read(fuse_req_t req, fuse_ino_t ino, size_t n, off_t at, struct fuse_file_info *fi) {
  static __thread char *buffer; static __thread size_t have;
  if (have < n) { buffer = realloc(buffer, n); have = n; }
  ssize_t got = pread(data, buffer, n, at);
  if (got < 0) fuse_reply_err(req, errno); else fuse_reply_buf(req, buffer, got);
}
static const struct fuse_lowlevel_ops ops = { .init = init, .lookup = lookup, .getattr = getattr, .open = do_open, .read = do_read };
int main(int argc, char **argv) { /* server FILE MOUNTPOINT */
  char *options[] = { argv[0], "-o", "ro,allow_other,default_permissions" };
  struct fuse_args args = FUSE_ARGS_INIT(3, options);
  struct stat st; struct fuse_loop_config *loop = fuse_loop_cfg_create();
  data = open(argv[1], O_RDONLY); if (data < 0 || fstat(data, &st)) return 2; size = st.st_size;
  struct fuse_session *s = fuse_session_new(&args, &ops, sizeof ops, NULL);
  if (!s || fuse_session_mount(s, argv[2])) return 3;
  fuse_set_signal_handlers(s); write(1, "ready\\n", 6);
  int failed = fuse_session_loop_mt(s, loop);
  fuse_session_unmount(s); fuse_session_destroy(s); return failed ? 4 : 0;
}
`;

/** Reads a file with O_DIRECT, in order or at random, in some threads; prints milliseconds. */
export const FUSE_READER_C = `
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
static int file, sequential; static long block, count; static off_t blocks;
static void *work(void *seed) {
  uint64_t x = 88172645463325252ull + (uintptr_t)seed * 7919; void *buffer;
  if (posix_memalign(&buffer, 4096, block)) exit(3);
  for (long i = 0; i < count; i++) {
    x ^= x << 13; x ^= x >> 7; x ^= x << 17;
    off_t at = (sequential ? i % blocks : (off_t)(x % blocks)) * block;
    if (pread(file, buffer, block, at) != block) exit(4);
  }
  return NULL;
}
int main(int argc, char **argv) { /* reader FILE seq|random BLOCK COUNT THREADS */
  struct stat st; struct timespec a, b; pthread_t threads[64]; int many = atoi(argv[5]);
  file = open(argv[1], O_RDONLY | O_DIRECT); if (file < 0 || fstat(file, &st)) return 2;
  sequential = !strcmp(argv[2], "seq"); block = atol(argv[3]); count = atol(argv[4]); blocks = st.st_size / block;
  clock_gettime(CLOCK_MONOTONIC, &a);
  for (long i = 0; i < many; i++) pthread_create(&threads[i], NULL, work, (void *)i);
  for (int i = 0; i < many; i++) pthread_join(threads[i], NULL);
  clock_gettime(CLOCK_MONOTONIC, &b);
  printf("%.3f", (b.tv_sec - a.tv_sec) * 1e3 + (b.tv_nsec - a.tv_nsec) / 1e6);
  return 0;
}
`;
