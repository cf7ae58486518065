// libfaketime shifts what pthread_cond_timedwait waits for as it shifts the clock, but knows nothing of C11's name for it, which
// librdkafka uses: its waits would end hours ago, or hours from now. glibc's types are the same underneath.
#include <errno.h>
#include <pthread.h>
#include <threads.h>

int cnd_timedwait(cnd_t *restrict cond, mtx_t *restrict mutex, const struct timespec *restrict until) {
  int code = pthread_cond_timedwait((pthread_cond_t *)cond, (pthread_mutex_t *)mutex, until);
  return code == 0 ? thrd_success : code == ETIMEDOUT ? thrd_timedout : thrd_error;
}
