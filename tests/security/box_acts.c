/* What measured code must not be able to do. `act` returns 0 if it could, else the errno with which it was refused.
 * As a program: box_acts ACT ARGUMENT [ACT ARGUMENT ...] prints one line for each. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static int said(long failed) { return failed ? errno : 0; }

static int opened(const char *path, int flags) {
  int fd = open(path, flags, 0600);
  char byte;
  if (fd < 0) return errno;
  int failed = (flags & O_ACCMODE) == O_RDONLY && !(flags & O_TRUNC) && read(fd, &byte, 1) < 0;
  return said(failed);
}

static int inet(int family, int type, const char *port) {
  int fd = socket(family, type, 0);
  if (fd < 0) return errno;
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(atoi(port)), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  return said(connect(fd, (struct sockaddr *)&to, sizeof to));
}

static int local(const char *path) {
  struct sockaddr_un to = {.sun_family = AF_UNIX};
  int pair[2], fd = socket(AF_UNIX, SOCK_STREAM, 0);
  strncpy(to.sun_path, path, sizeof to.sun_path - 1);
  if (fd >= 0) return said(connect(fd, (struct sockaddr *)&to, sizeof to));
  if (socketpair(AF_UNIX, SOCK_DGRAM, 0, pair)) return errno; /* one of a pair of these can be sent elsewhere */
  return said(connect(pair[0], (struct sockaddr *)&to, sizeof to));
}

static int child(int (*begin)(void)) {
  pid_t pid = fork();
  if (pid < 0) return errno;
  if (pid == 0) {
    int failed = begin();
    if (!failed && fork() == 0) pause(); /* left behind, in a session of its own */
    _exit(failed);
  }
  int status;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

static int new_session(void) { return said(setsid() < 0); }
static int new_group(void) { return said(setpgid(0, 0) < 0); }
static int only_fork(void) { return 0; }

/* At most `most` processes, so that a box that does not hold harms nobody. */
static int bomb(int most) {
  for (int n = 0; n < most; ++n) {
    pid_t pid = fork();
    if (pid < 0) return errno;
    if (pid == 0) pause();
  }
  return 0;
}

int act(const char *what, const char *with) {
  char path[4096];
#define IS(name) (strcmp(what, name) == 0)
  if (IS("read")) return opened(with, O_RDONLY);
  if (IS("write")) return opened(with, O_WRONLY | O_CREAT);
  if (IS("cut")) return opened(with, O_RDONLY | O_TRUNC);
  if (IS("truncate")) return said(truncate(with, 0));
  if (IS("delete")) return said(unlink(with));
  if (IS("rename")) return said(rename(with, "renamed"));
  if (IS("link")) return said(link(with, "linked"));
  if (IS("symlink")) return said(symlink(with, "linked"));
  if (IS("fifo")) return said(mkfifo(with, 0600));
  if (IS("list")) return opened(with, O_RDONLY | O_DIRECTORY) == EISDIR ? 0 : errno;
  if (IS("environ") || IS("mem") || IS("maps")) {
    snprintf(path, sizeof path, "/proc/%s/%s", with, what);
    return opened(path, O_RDONLY);
  }
  if (IS("ptrace")) {
    int failed = said(ptrace(PTRACE_SEIZE, atoi(with), 0, 0));
    if (!failed) ptrace(PTRACE_DETACH, atoi(with), 0, 0);
    return failed;
  }
  if (IS("kill")) return said(kill(atoi(with), SIGKILL));
  if (IS("signal-all")) { /* as kill(-1, SIGKILL), which says nothing of who got it, with a signal that others ignore */
    kill(-1, SIGURG);
    return EPERM;
  }
  if (IS("wait")) {
    signal(SIGURG, _exit);
    puts("waiting");
    fflush(stdout);
    pause();
  }
  if (IS("limit")) return said(syscall(SYS_prlimit64, atoi(with), RLIMIT_NOFILE, &(struct rlimit){9999, 9999}, 0));
  if (IS("priority")) return said(setpriority(PRIO_PROCESS, atoi(with), 19));
  if (IS("tcp")) return inet(AF_INET, SOCK_STREAM, with);
  if (IS("udp")) return inet(AF_INET, SOCK_DGRAM, with);
  if (IS("tcp6")) return said(socket(AF_INET6, SOCK_STREAM, 0) < 0);
  if (IS("netlink")) return said(socket(AF_NETLINK, SOCK_RAW, 0) < 0);
  if (IS("unix")) return local(with);
  if (IS("io_uring")) return said(syscall(SYS_io_uring_setup, 1, path) < 0);
  if (IS("session")) return child(new_session);
  if (IS("group")) return child(new_group);
  if (IS("fork")) return child(only_fork);
  if (IS("program")) return said(execl("/bin/true", "true", (char *)0));
  if (IS("bomb")) return bomb(atoi(with));
  if (IS("namespace")) return said(unshare(CLONE_NEWUSER | CLONE_NEWNET));
  if (IS("mount")) return said(mount("none", with, "tmpfs", 0, 0));
  if (IS("memfd")) return said(syscall(SYS_memfd_create, "m", 0) < 0);
  if (IS("memfd-secret")) return said(syscall(SYS_memfd_secret, 0) < 0);
  if (IS("map-shared")) return said(mmap(0, 4096, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0) == MAP_FAILED);
  if (IS("map-stack")) return said(mmap(0, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN, -1, 0) == MAP_FAILED);
  if (IS("shared-memory")) return said(shmget(IPC_PRIVATE, 4096, 0600) < 0);
  if (IS("outlive")) return said(prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0));
  if (IS("mode")) return said(chmod(with, 0777));
  if (IS("large")) { /* sparse: a limit that does not hold costs no space */
    int fd = open(with, O_WRONLY | O_CREAT, 0600);
    return fd < 0 ? errno : said(pwrite(fd, "x", 1, 100L << 30) < 0);
  }
  return 0;
}

int main(int count, char **words) {
  for (int n = 1; n + 1 < count; n += 2) {
    int refused = act(words[n], words[n + 1]);
    printf("%s: %s\n", words[n], refused ? strerror(refused) : "DONE");
    fflush(stdout);
  }
  return 0;
}
