// What happens to shared memory when the process forks. fork() runs it (pthread_atfork) before it returns, whichever library calls fork().
// Needs no Python. vfork and posix_spawn run none of our code in their children, so they do not count as forks here.
#pragma once

#include <algorithm>
#include <mutex>
#include <vector>

#include <pthread.h>

namespace stepmill {

// An object that is called at each fork of its process, from the end of its constructor on. In the child it may only make system
// calls: other threads of the parent may have held locks, which nobody releases in the child.
class AtFork {
   public:
    AtFork() = default;
    AtFork(const AtFork&) = delete;
    AtFork& operator=(const AtFork&) = delete;

    // Delays forks while it is held: a child sees all of what is changed meanwhile, or nothing.
    static std::mutex& forks() {
        return registry().mutex;
    }

   protected:
    ~AtFork() = default;

    virtual void before_fork() noexcept {}
    virtual void after_fork_in_parent() noexcept {}
    virtual void after_fork_in_child() noexcept = 0;

    // Called by the most derived class, which holds forks().
    void join() { registry().members.push_back(this); }
    void leave() noexcept { std::erase(registry().members, this); }

   private:
    struct Registry {
        std::mutex mutex;               // held from before_fork() until fork() has returned, in the parent and in the child
        std::vector<AtFork*> members;   // in the order of construction
    };

    static Registry& registry() {
        static Registry* const made = [] {
            auto* fresh = new Registry;  // never freed: the process may fork until it ends
            pthread_atfork(before, after_in_parent, after_in_child);
            return fresh;
        }();
        return *made;
    }

    static void before() {
        registry().mutex.lock();
        for (AtFork* member : registry().members) member->before_fork();
    }
    static void after_in_parent() {
        for (AtFork* member : registry().members) member->after_fork_in_parent();
        registry().mutex.unlock();
    }
    static void after_in_child() {
        for (AtFork* member : registry().members) member->after_fork_in_child();
        registry().mutex.unlock();  // by the copy of the thread that locked it
    }
};

}  // namespace stepmill
