// SPDX-License-Identifier: Apache-2.0
// base/process/own_process.h: keeps a forked child away from what belongs to its parent.
//
// fork() copies every object, but no thread. Shared memory, sockets and pipes are the same ones in the child. So a child
// that destroys its copy of a World would wait for threads that it does not have, and tell the other ranks that its
// parent has left. Such objects remember the process that made them; in a child of it they do nothing.
//
// Threads: any
#pragma once

#include <pthread.h>

#include <memory>
#include <new>
#include <utility>

namespace lockstep {

// The process in which it was made; a copy remembers the same one.
class OwnProcess {
 public:
  OwnProcess();
  bool is_here() const;  // false in a forked child, and in children of that

 private:
  unsigned forks_;  // that led to it
};

// Deletes in the process that made the object only. In a forked child the object stays in memory, untouched.
struct DeleteInOwnProcess {
  DeleteInOwnProcess() = default;
  template <class T>
  DeleteInOwnProcess(std::default_delete<T>) {}  // so that what make_unique returns becomes an OwnedHere

  template <class T>
  void operator()(T* object) const {
    if (process.is_here()) std::default_delete<T>()(object);
  }

  OwnProcess process;
};

template <class T>
using OwnedHere = std::unique_ptr<T, DeleteInOwnProcess>;

// While a thread forks, no other thread is inside what locks the mutex: the child finds it unlocked, and what it guards
// consistent. For mutexes that a child can't do without, and that are never destroyed.
template <class Mutex, Mutex& (*mutex)()>
void hold_during_fork() {
  // Unlocking would not do in the child: a std::shared_mutex knows the thread that locked it.
  static const int registered =
      ::pthread_atfork([] { mutex().lock(); }, [] { mutex().unlock(); }, [] { new (&mutex()) Mutex; });
  static_cast<void>(registered);
}

// Moves the object to memory that is never freed, so that the child does not destroy it.
template <class T>
void leave_to_parent(T& object) {
  static_cast<void>(new T(std::move(object)));
}

}  // namespace lockstep
