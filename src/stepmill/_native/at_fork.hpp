// What must be done about shared memory when its process forks: by fork() itself, in whatever library, before it returns.
// Knows no Python. vfork and posix_spawn are no forks in this sense: nothing of ours runs in their children.
#pragma once

#include <algorithm>
#include <mutex>
#include <vector>

#include <pthread.h>

namespace stepmill {

// An object that takes part in each fork of its process, from the end of its constructor on. In the child only system calls
// are made: other threads held locks that nobody there will release.
class AtFork {
   public:
    AtFork() = default;
    AtFork(const AtFork&) = delete;
    AtFork& operator=(const AtFork&) = delete;

    // Keeps forks away while it is held: of what is changed meanwhile a child sees all or nothing.
    static std::mutex& forks() {
        return registry().mutex;
    }

   protected:
    ~AtFork() = default;

    virtual void before_fork() noexcept {}
    virtual void after_fork_in_parent() noexcept {}
    virtual void after_fork_in_child() noexcept = 0;

    // Called by the most derived class, with forks() held.
    void join() { registry().members.push_back(this); }
    void leave() noexcept { std::erase(registry().members, this); }

   private:
    struct Registry {
        std::mutex mutex;               // held from before_fork() until the fork has returned in this process, and in the child
        std::vector<AtFork*> members;   // in the order of their construction
    };

    static Registry& registry() {
        static Registry* const made = [] {
            auto* fresh = new Registry;  // lives as long as the process: it may fork until the very end
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
        registry().mutex.unlock();  // by the thread that locked it: its copy
    }
};

}  // namespace stepmill
