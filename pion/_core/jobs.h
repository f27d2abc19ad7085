/* A pool of C threads that run jobs without the GIL: transfers, last closes, unlinks, fsyncs.
 *
 * A job is a struct the caller embeds in its own object, so submitting never allocates and never fails: when no thread
 * can be started the job runs in the caller. Threads start with the first jobs and are joined by jobs_free.
 */
#ifndef PION_JOBS_H
#define PION_JOBS_H

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#define JOBS_MAX_THREADS 64

typedef struct job {
    struct job *next;
    void (*run)(struct job *job, void *thread_state);
} job;

typedef struct jobs {
    pthread_mutex_t lock;
    pthread_cond_t work, idle;
    job *head, **tail;
    int max, started, waiting, stop;
    int queued, active;
    void *(*state_new)(void);        /* per thread scratch, NULL when jobs need none */
    void (*state_free)(void *);
    pthread_t threads[JOBS_MAX_THREADS];
} jobs;

static inline void *jobs__thread(void *arg) {
    jobs *pool = (jobs *)arg;
    void *state = pool->state_new ? pool->state_new() : NULL;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->head && !pool->stop) {
            pool->waiting++;
            pthread_cond_wait(&pool->work, &pool->lock);
            pool->waiting--;
        }
        job *next = pool->head;
        if (!next) break;            /* stopping, and everything queued has run */
        pool->head = next->next;
        if (!pool->head) pool->tail = &pool->head;
        pool->queued--;
        pool->active++;
        pthread_mutex_unlock(&pool->lock);
        next->run(next, state);
        pthread_mutex_lock(&pool->lock);
        pool->active--;
        if (!pool->active && !pool->queued) pthread_cond_broadcast(&pool->idle);
    }
    pthread_mutex_unlock(&pool->lock);
    if (state && pool->state_free) pool->state_free(state);
    return NULL;
}

static inline jobs *jobs_new(int threads, void *(*state_new)(void), void (*state_free)(void *)) {
    jobs *pool = (jobs *)calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->idle, NULL);
    pool->tail = &pool->head;
    pool->max = threads < 1 ? 1 : threads > JOBS_MAX_THREADS ? JOBS_MAX_THREADS : threads;
    pool->state_new = state_new;
    pool->state_free = state_free;
    return pool;
}

/* Signals belong to the main thread: a pool thread starts with all of them blocked. Called with the lock held. */
static inline int jobs__start_thread(jobs *pool) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&pool->threads[pool->started], NULL, jobs__thread, pool);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc == 0) pool->started++;
    return rc;
}

static inline void jobs_submit(jobs *pool, job *item) {
    item->next = NULL;
    pthread_mutex_lock(&pool->lock);
    if (pool->queued >= pool->waiting && pool->started < pool->max && !pool->stop) jobs__start_thread(pool);
    if (pool->started == 0 || pool->stop) {
        pthread_mutex_unlock(&pool->lock);
        void *state = pool->state_new ? pool->state_new() : NULL;
        item->run(item, state);
        if (state && pool->state_free) pool->state_free(state);
        return;
    }
    *pool->tail = item;
    pool->tail = &item->next;
    pool->queued++;
    pthread_cond_signal(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

/* True when other jobs wait: a long job then goes to the back of the queue. */
static inline int jobs_contended(jobs *pool) {
    pthread_mutex_lock(&pool->lock);
    int waiting = pool->queued > pool->waiting;
    pthread_mutex_unlock(&pool->lock);
    return waiting;
}

/* Wait until nothing is queued or running; timeout_ms < 0 waits for ever. Returns 1 when idle, 0 on timeout. */
static inline int jobs_wait_idle(jobs *pool, long timeout_ms) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += (timeout_ms % 1000) * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000L;
    }
    pthread_mutex_lock(&pool->lock);
    int rc = 0;
    while ((pool->queued || pool->active) && rc == 0) {
        rc = timeout_ms < 0 ? pthread_cond_wait(&pool->idle, &pool->lock)
                            : pthread_cond_timedwait(&pool->idle, &pool->lock, &until);
    }
    int done = !pool->queued && !pool->active;
    pthread_mutex_unlock(&pool->lock);
    return done;
}

/* Run what is queued, join the threads, free the pool. */
static inline void jobs_free(jobs *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->stop = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->started; i++) pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->idle);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

#endif
