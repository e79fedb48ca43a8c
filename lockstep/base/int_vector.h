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
class IntVector : private std::vector<T> {
  using Elements = std::vector<T>;

 public:
  using typename Elements::value_type;

  IntVector() = default;
  explicit IntVector(int size, const T& value = T()) : Elements(to_size(size), value) {}
  IntVector(std::initializer_list<T> elements) : Elements(elements) {}
  IntVector(std::vector<T> elements) : Elements(std::move(elements)) {}

  int size() const { return static_cast<int>(Elements::size()); }
  decltype(auto) operator[](int index) { return Elements::operator[](checked(index)); }
  decltype(auto) operator[](int index) const { return Elements::operator[](checked(index)); }

  using Elements::back;
  using Elements::begin;
  using Elements::clear;
  using Elements::data;
  using Elements::emplace_back;
  using Elements::empty;
  using Elements::end;
  using Elements::front;
  using Elements::push_back;

  void assign(int size, const T& value) { Elements::assign(to_size(size), value); }
  void resize(int size) { Elements::resize(to_size(size)); }
  void reserve(int size) { Elements::reserve(to_size(size)); }

  const std::vector<T>& elements() const { return *this; }
  bool operator==(const IntVector&) const = default;

 private:
  std::size_t checked([[maybe_unused]] int index) const {
    assert(index >= 0 && index < size());
    return to_size(index);
  }
};

}  // namespace lockstep
