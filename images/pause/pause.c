/* The process that holds a pod's namespaces: it sleeps until told to end, and reaps children given to it. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void on_term(int number) {
  (void)number;
  _exit(0);
}

static void on_child(int number) {
  (void)number;
  while (waitpid(-1, NULL, WNOHANG) > 0) {
  }
}

int main(void) {
  struct sigaction term = {.sa_handler = on_term};
  struct sigaction child = {.sa_handler = on_child, .sa_flags = SA_NOCLDSTOP};
  if (sigaction(SIGTERM, &term, NULL) || sigaction(SIGINT, &term, NULL) || sigaction(SIGCHLD, &child, NULL)) {
    return EXIT_FAILURE;
  }
  for (;;) {
    pause();
  }
}
