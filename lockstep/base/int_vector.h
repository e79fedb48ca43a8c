// SPDX-License-Identifier: Apache-2.0
// base/int_vector.h: a vector that is indexed by int: one element per rank, device, stage or micro-batch.
//
// Ranks are ints, as in MPI and torch; std::vector wants unsigned indices. Checked in debug builds.
#pragma once

#include <cassert>
#include <cstddef>
#include <initializer_list>
#include <utility>
#include <vector>

#include "lockstep/base/to_size.h"

namespace lockstep {

template <class T>
class IntVector {
 public:
  using value_type = T;

  IntVector() = default;
  explicit IntVector(int size, const T& value = T()) : elements_(to_size(size), value) {}
  IntVector(std::initializer_list<T> elements) : elements_(elements) {}
  IntVector(std::vector<T> elements) : elements_(std::move(elements)) {}

  int size() const { return static_cast<int>(elements_.size()); }
  bool empty() const { return elements_.empty(); }
  decltype(auto) operator[](int index) { return elements_[checked(index)]; }
  decltype(auto) operator[](int index) const { return elements_[checked(index)]; }
  T* data() { return elements_.data(); }
  const T* data() const { return elements_.data(); }

  auto begin() { return elements_.begin(); }
  auto end() { return elements_.end(); }
  auto begin() const { return elements_.begin(); }
  auto end() const { return elements_.end(); }
  decltype(auto) front() { return elements_.front(); }
  decltype(auto) front() const { return elements_.front(); }
  decltype(auto) back() { return elements_.back(); }
  decltype(auto) back() const { return elements_.back(); }

  void assign(int size, const T& value) { elements_.assign(to_size(size), value); }
  void resize(int size) { elements_.resize(to_size(size)); }
  void reserve(int size) { elements_.reserve(to_size(size)); }
  void clear() { elements_.clear(); }
  void push_back(T element) { elements_.push_back(std::move(element)); }
  template <class... Arguments>
  decltype(auto) emplace_back(Arguments&&... arguments) {
    return elements_.emplace_back(std::forward<Arguments>(arguments)...);
  }

  const std::vector<T>& elements() const { return elements_; }
  bool operator==(const IntVector&) const = default;

 private:
  std::size_t checked([[maybe_unused]] int index) const {
    assert(index >= 0 && index < size());
    return to_size(index);
  }

  std::vector<T> elements_;
};

}  // namespace lockstep
