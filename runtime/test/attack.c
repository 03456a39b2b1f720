/* What hostile code in a sandbox tries on its agent, its file system and the kernel. A line each: name, then 0 or errno. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <stddef.h>
#include <signal.h>
#include <unistd.h>

static void told(const char *name, long result) {
  printf("%s %d\n", name, result < 0 ? errno : 0);
}

static long socketcall(int family) {
#ifdef __x86_64__
  /* A 32-bit call by a 64-bit program: its arguments have to lie below 4 GiB. */
  unsigned *args = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
  long result;
  args[0] = family, args[1] = SOCK_STREAM, args[2] = 0;
  __asm__ volatile("int $0x80" : "=a"(result) : "a"(102L), "b"(1L), "c"(args) : "memory");
  if (result < 0) errno = -result, result = -1;
  return result;
#else
  errno = EAFNOSUPPORT;
  return -1;
#endif
}

int main(int argc, char **argv) {
  char byte;
  struct iovec iov = {&byte, 1}, remote = {(void *)0x400000, 1};
  struct rlimit limit = {0, 0};
  cpu_set_t one;
  long fd;
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (argc > 1 && !strcmp(argv[1], "socketcall")) {
    told("socketcall-vsock", socketcall(40));
    return 0;
  }
  if (argc > 2 && !strcmp(argv[1], "abstract")) {
    struct sockaddr_un to = {AF_UNIX};
    size_t length = strlen(argv[2]);
    memcpy(to.sun_path + 1, argv[2], length);
    fd = socket(AF_UNIX, SOCK_STREAM, 0);
    /* Some name it with its exact length, some with zeros to the end. */
    long done = connect(fd, (struct sockaddr *)&to, offsetof(struct sockaddr_un, sun_path) + 1 + length);
    if (done < 0 && errno == ECONNREFUSED) done = connect(fd, (struct sockaddr *)&to, sizeof to);
    told("abstract", done);
    return 0;
  }
  CPU_ZERO(&one);
  CPU_SET(0, &one);
  told("ptrace-attach", ptrace(PTRACE_ATTACH, 1, 0, 0));
  told("ptrace-seize", ptrace(PTRACE_SEIZE, 1, 0, 0));
  told("process_vm_readv", process_vm_readv(1, &iov, 1, &remote, 1, 0));
  told("mem", open("/proc/1/mem", O_RDWR));
  told("environ", open("/proc/1/environ", O_RDONLY));
  told("maps", (fd = open("/proc/1/maps", O_RDONLY)) < 0 ? -1 : read(fd, &byte, 1));
  told("exe-link", readlink("/proc/1/exe", &byte, 1));
  told("exe-open", open("/proc/1/exe", O_RDONLY));
  for (int i = 0; i < 64; i++) {
    char path[32];
    snprintf(path, sizeof path, "/proc/1/fd/%d", i);
    if (open(path, O_RDWR) >= 0 || open(path, O_WRONLY) >= 0 || open(path, O_RDONLY) >= 0) printf("fd-%d 0\n", i);
  }
  fd = syscall(SYS_pidfd_open, 1, 0);
  for (int i = 0; i < 64; i++)
    if (syscall(SYS_pidfd_getfd, fd, i, 0) >= 0) printf("getfd-%d 0\n", i);
  told("prlimit", prlimit(1, RLIMIT_NOFILE, &limit, NULL));
  told("affinity", sched_setaffinity(1, sizeof one, &one));
  told("priority", setpriority(PRIO_PROCESS, 1, 19));
  told("priority-all", setpriority(PRIO_USER, 0, 19));
  told("own-priority", setpriority(PRIO_PROCESS, 0, 1));
  told("own-affinity", sched_setaffinity(0, sizeof one, &one));
  fd = open("/victim", O_RDWR | O_CREAT, 0600);
  told("swapext", ioctl(fd, 0xc0c0586d, &byte));
  told("fssetxattr", ioctl(fd, 0x401c5820, &byte));
  told("move-ext", ioctl(fd, 0xc028660f, &byte));
  told("shutdown", ioctl(fd, 0x8004587d, &byte));
  told("freeze", ioctl(fd, 0xc0045877, &byte));
  told("upper-half", syscall(SYS_ioctl, fd, 0x1c0c0586dL, &byte));
  told("vsock", socket(40, SOCK_STREAM, 0));
  told("vsock-upper-half", syscall(SYS_socket, 0x100000028L, SOCK_STREAM, 0));
  told("alg", socket(38, SOCK_SEQPACKET, 0));
  told("mount", mount("none", "/tmp", "tmpfs", 0, ""));
  told("unshare-user", unshare(CLONE_NEWUSER));
  told("umount-proc", umount2("/proc", MNT_DETACH));
  told("reboot", syscall(SYS_reboot, 0xfee1dead, 672274793, 0x4321fedc, NULL));
  told("io_uring", syscall(SYS_io_uring_setup, 1, &byte));
  told("bpf", syscall(SYS_bpf, 0, &byte, 0));
  kill(1, SIGKILL), kill(1, SIGSTOP), kill(1, SIGTERM), kill(1, SIGSEGV);
  told("done", 0);
  return 0;
}
